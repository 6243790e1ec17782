"""Training on this machine: the held-out loss of each arm against steps, bytes and seconds."""
