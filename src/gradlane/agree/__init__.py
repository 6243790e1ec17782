"""Ranks agree through the job's store, before and beside all collectives."""
