"""Lightning, Accelerate and transformers: one module for each, and only it imports its framework."""
