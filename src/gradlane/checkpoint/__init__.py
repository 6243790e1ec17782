"""Checkpoints of an attachment: a folder with a file per rank, and a manifest (docs/checkpoints.md)."""
