"""Evaluation and deployed files see the weights that all ranks agreed on; training goes on with each rank's
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any

import torch

from ..session import Session

State = dict[str, Any]


class AgreedWeights:
    """``session.agreed()`` as frameworks need it: between two of their hooks, and within itself."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._block = ExitStack()

    def show(self, session: Session | None, *, closed_too: bool = False) -> None:
        """Until ``hide``. Collective. Nothing changes without a session that is open."""
        if self._session is None and session is not None and (session.is_open or closed_too):
            self._block.enter_context(session.agreed())
            self._session = session

    def hide(self) -> None:
        """Twice is fine."""
        self._session = None
        self._block.close()

    @contextmanager
    def shown(self, session: Session | None, *, closed_too: bool = False) -> Iterator[None]:
        """Show them in this block, unless they are shown already."""
        if self._session is not None:
            yield
            return
        self.show(session, closed_too=closed_too)
        try:
            yield
        finally:
            self.hide()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Each rank has its own in this block."""
        session = self._session
        self.hide()
        try:
            yield
        finally:
            self.show(session)

    def during(self, call: Callable[..., Any], session: Callable[[], Session | None]) -> Callable[..., Any]:
        """The same function, with the agreed weights in the model while it runs."""

        @wraps(call)
        def with_agreed_weights(*args: Any, **kwargs: Any) -> Any:
            with self.shown(session()):
                return call(*args, **kwargs)

        return with_agreed_weights


def copied(state: State) -> State:
    """A state dict that stays as it is when the model changes. Tied weights stay tied."""
    with torch.inference_mode(False):
        return deepcopy(state)
