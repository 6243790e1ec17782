"""Strategies without a network: n ranks in one process (Simulation), or meta tensors (dry run)."""
