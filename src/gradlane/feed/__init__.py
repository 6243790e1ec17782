"""Gradients become the buckets of a step; README.md explains its states."""
