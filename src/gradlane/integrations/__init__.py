"""Lightning, Accelerate, transformers and Ray Train: one module for each, and only it imports its framework."""
