"""Gradient matrices as products of two thin factors: PowerSGD and its kin."""
