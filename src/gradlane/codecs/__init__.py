"""Codecs: a gradient as a payload of bytes, and back."""
