"""Measures on this machine: emulated links, arms that step in rounds, figures."""
