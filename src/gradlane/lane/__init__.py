"""Lanes drive strategies over real process groups, in one order on every rank."""
