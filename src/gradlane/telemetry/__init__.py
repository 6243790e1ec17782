"""Metrics and recordings of what the lanes did. It reads events, never lanes."""
