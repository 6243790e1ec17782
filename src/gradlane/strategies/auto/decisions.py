"""What ``Auto`` has decided, as data: it is saved, compared, and can be followed by another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.numbers import is_whole
from ...errors import InvalidValue


class Decision(NamedTuple):
    """From ``step`` on ``strategy`` reduces the gradients."""

    step: int
    strategy: str
    why: str


def as_state(decisions: Sequence[Decision]) -> dict[str, Any]:
    return {str(number): decision._asdict() for number, decision in enumerate(decisions)}


def from_state(state: object) -> list[Decision]:
    if not isinstance(state, Mapping):
        raise InvalidValue(f"the decisions are a {type(state).__name__}; load what an Auto has saved")
    try:
        return [Decision(**state[str(number)]) for number in range(len(state))]
    except (KeyError, TypeError) as error:
        raise InvalidValue(f"the decisions lack something ({error}); load what an Auto has saved") from None


def as_script(replay: object) -> dict[int, str]:
    """Step by strategy, from a mapping or from what ``attachment.decisions()`` gave."""
    pairs: Iterable[Any]
    if isinstance(replay, Mapping):
        pairs = replay.items()
    elif isinstance(replay, list | tuple):
        pairs = [decision[:2] for decision in replay]
    else:
        raise InvalidValue(
            f"replay is a {type(replay).__name__}; give a mapping from step to strategy, as "
            "{0: 'Mean()', 40: 'Sharded(Int8())'}, or what attachment.decisions() gave"
        )
    script = dict(pairs)
    for step, text in script.items():
        if not is_whole(step) or step < 0 or not isinstance(text, str):
            raise InvalidValue(
                f"replay has {step!r}: {text!r}; write a step from 0 up, and the text of a strategy"
            )
    return dict(sorted(script.items()))
