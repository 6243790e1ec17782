"""A session: one strategy at work on one model, from ``attach`` to ``close``.

- ``base.py``: what every session is; ``opening.py``, ``swap.py`` and ``state.py`` have its parts.
- ``freezing.py``, ``moments_agreement.py``: an Adam optimizer that follows its steps (``freeze_moments``).
- ``attachment.py``: on a DDP model; ``own_loop.py``: in a loop without DDP; ``one_process.py``: alone.
"""

from .base import Session as Session
