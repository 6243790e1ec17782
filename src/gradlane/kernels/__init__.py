"""The inner loops of the codecs: compiled C where it was built, and what both versions share."""
