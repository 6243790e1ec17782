"""One state, one model: a strategy is refused where its state belongs to another model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..errors import WrongState
from .ownership import Ownership, ownership_of, set_ownership
from .strategy import Strategy, is_stateful, named_states, options, parts


def exclusive_states(strategy: Strategy) -> Iterator[tuple[str, object]]:
    """Name (``ErrorFeedback.memory``) and object of all that two models must not use at the same time.

    That is every state, and an option that says ``for_one_model`` (a ``TokenCount``).
    """
    for leaf in named_states(strategy):
        yield leaf.owner, leaf.state
    for part in parts(strategy):
        for _, name, value in options(part):
            if getattr(value, "for_one_model", False):
                yield f"{type(part).__name__}.{name}", value


def refuse_foreign(strategy: Strategy, model: nn.Module | None, own: Ownership | None = None) -> None:
    """Refuse a state that another model uses, or that still holds something of another model's steps.

    ``own`` is the ownership that it may have already. A state with ``lasts = True`` is about the data,
    whatever the model (the ledger of ``Private``): it only must not be in use twice.
    """
    for name, state in exclusive_states(strategy):
        ownership = ownership_of(state)
        if ownership is None or ownership is own:
            continue
        if ownership.works_with(state):
            raise WrongState(
                f"{name} is at work on another model already, and what it keeps of the one would go into the "
                "other; make a strategy for each model: call what builds it once for each, or give its text"
            )
        if ownership.used and not ownership.is_of(model) and not getattr(state, "lasts", False):
            raise WrongState(
                f"{name} still has what the steps of another model left in it, and that would go into the "
                f"first step of this one; make a new strategy for it, or give its text{_ledgers(strategy)}. "
                "To carry it on on purpose: attachment.load_state_dict(old.state_dict()) on the new one"
            )


def _ledgers(strategy: Strategy) -> str:
    """A new strategy must not forget what was spent."""
    lasting = [
        name
        for name, state in exclusive_states(strategy)
        if getattr(state, "lasts", False) and is_stateful(state)
    ]
    return f", with {', '.join(lasting)} of the old one, which counts what was spent" if lasting else ""


def claim(strategy: Strategy, ownership: Ownership) -> None:
    """From now on all states of the strategy belong there."""
    for _, state in exclusive_states(strategy):
        set_ownership(state, ownership)
