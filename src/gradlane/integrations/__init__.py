"""Lightning, Accelerate, transformers, Ray Train: a module for each, and only it imports its framework."""
