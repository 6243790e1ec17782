"""Functions in the language of Triton: importing anything in here needs it."""
