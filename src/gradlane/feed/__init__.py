"""Gradients become buckets: DDP's, or those of a loop of one's own; what a step is, and when it counts."""
