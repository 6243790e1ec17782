"""What the lanes did, in figures and on a page. Reads events, and the JSON that verbs write; never lanes."""
