"""How long a step will take, from figures of its parts: the link, the strategy's work, and compute."""
