"""Measuring on this machine: emulated links, arms that take turns, figures."""
