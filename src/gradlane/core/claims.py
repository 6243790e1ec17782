"""One state, one model: a strategy with memory is refused where that is another model's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..errors import WrongState
from .home import Home, home_of, settle_in
from .strategy import Strategy, is_stateful, named_states, options, parts


def held(strategy: Strategy) -> Iterator[tuple[str, object]]:
    """Whose (``ErrorFeedback.memory``) and what: all that must not be at work on two models at once.

    That is every state, and an option that says ``for_one_model`` (a ``TokenCount``).
    """
    for leaf in named_states(strategy):
        yield leaf.owner, leaf.state
    for part in parts(strategy):
        for _, name, value in options(part):
            if getattr(value, "for_one_model", False):
                yield f"{type(part).__name__}.{name}", value


def refuse_foreign(strategy: Strategy, model: nn.Module | None, own: Home | None = None) -> None:
    """Refuse what is at work elsewhere, or still has what another model's steps left in it.

    ``own`` is where it may be at work. A state whose ``lasts`` is true counts what was done whatever the
    model (the budget of ``Private``): it only must not be at work twice.
    """
    for name, state in held(strategy):
        home = home_of(state)
        if home is None or home is own:
            continue
        if home.works_with(state):
            raise WrongState(
                f"{name} is at work on another model already, and what it keeps of the one would go into the "
                "other; make a strategy for each model: call what builds it once for each, or give its text"
            )
        if home.used and not home.is_of(model) and not getattr(state, "lasts", False):
            raise WrongState(
                f"{name} still has what the steps of another model left in it, and that would go into the "
                f"first step of this one; make a new strategy for it, or give its text{_budget(strategy)}. "
                "To carry it on on purpose: attachment.load_state_dict(old.state_dict()) on the new one"
            )


def _budget(strategy: Strategy) -> str:
    """A new strategy must not forget what was spent."""
    lasting = [
        name for name, state in held(strategy) if getattr(state, "lasts", False) and is_stateful(state)
    ]
    return f", with {', '.join(lasting)} of the old one, which counts what was spent" if lasting else ""


def claim(strategy: Strategy, home: Home) -> None:
    """From now on all that the strategy keeps belongs there."""
    for _, state in held(strategy):
        settle_in(state, home)
