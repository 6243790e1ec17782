"""Bucket, strategy, collectives, memory: all that a strategy author has to know. See README.md."""
