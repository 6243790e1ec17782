"""The command line: one file per verb. torch is imported only when a verb runs."""

from .main import main

__all__ = ["main"]
