"""What the lanes did, in figures. Reads events, never lanes."""
