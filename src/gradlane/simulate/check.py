"""``check_strategy``: run the laws on a strategy of your own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.memory import Memory
from ..core.strategy import Strategy, named_states, parts
from ..errors import InvalidValue
from ..strategies.as_strategy import as_strategy
from ..strategies.cast import Cast
from ..strategies.feedback import ErrorFeedback
from ..strategies.private import Private
from ..strategies.route import Route
from ..strategies.schedule import After
from .buckets import Shape, slots_of
from .case import Case
from .laws import LAWS

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "scale": (), "b.weight": (3, 2, 2), "none": (0, 4)}
"""A matrix, a vector, a scalar, a convolution kernel, and an empty tensor."""
WORLDS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Finding:
    """A law that a strategy breaks, and where."""

    law: str
    message: str

    def __str__(self) -> str:
        return f"{self.law}: {self.message}"


def check_strategy(
    strategy: Strategy | str,
    shapes: Mapping[str, Shape] | nn.Module | None = None,
    *,
    worlds: Iterable[int] = WORLDS,
    names: Mapping[str, Callable[..., Any]] | None = None,
    residual: Callable[[Any], Memory] | None = None,
) -> list[Finding]:
    """Check a strategy of your own by the laws of all strategies: ``assert not check_strategy(Mine())``.

    The laws, on simulated ranks in one process:

    - All ranks get the same finite bits, and two runs give the same results.
    - A dry run asks for what a real step asks for.
    - A run that was stopped and resumed gives the results of an uninterrupted run.
    - All state is saved, and a step that was undone leaves no trace.
    - Another number of ranks can go on.
    - What arrived and the residual, and what a ``decay`` took off it, add up to the gradients.
    - The text form reads back.

    Each finding says which law the strategy breaks, and where. An empty list means that it obeys all.

    Args:
        strategy: a strategy, or its text. It does not change.
        shapes: ``{name: shape}`` or a module; by default a few unusual shapes.
        worlds: numbers of ranks. Those that the strategy refuses (``check_world``) are left out.
        names: classes of your own in its text, as for ``parse``.
        residual: returns the ``Memory`` in which the strategy keeps a residual of its own. The residual of
            ``ErrorFeedback`` is found without it.
    """
    strategy = copy.deepcopy(as_strategy(strategy))
    if any(isinstance(part, Private) and part.noise_multiplier for part in parts(strategy)):
        raise InvalidValue("two runs of Private differ by their noise; check it with noise_multiplier=0")
    tuples = {slot.name: tuple(slot.shape) for slot in slots_of(SHAPES if shapes is None else shapes)}
    case = Case(strategy, tuples, tuple(worlds), names or {}, _residual_of(strategy, residual), _decayed)
    if not case.worlds:
        raise InvalidValue(
            f"{type(strategy).__name__} refuses all of worlds={case.wanted}; name one that it can work with"
        )
    return [finding for law in LAWS for finding in _findings(law, case)]


def _findings(law: Callable[[Case], Iterable[str]], case: Case) -> list[Finding]:
    name = law.__name__.replace("_", " ")
    found: list[Finding] = []
    try:
        found += [Finding(name, message) for message in law(case)]
    except Exception as error:  # noqa: BLE001  the author must see every error of the strategy
        found.append(Finding(name, f"{type(error).__name__}: {error}"))
    return found


def _residual_of(
    strategy: Strategy, residual: Callable[[Any], Memory] | None
) -> Callable[[Strategy], Mapping[str, Tensor]] | None:
    if residual is not None:
        return lambda own: residual(own).state_dict()
    if _feeds_back_a_mean(strategy):
        return _all_residuals
    return None


def _feeds_back_a_mean(strategy: Strategy) -> bool:
    """Whether it has error feedback that gets the gradient itself, around a strategy that takes a mean."""
    if isinstance(strategy, After):
        return _feeds_back_a_mean(strategy.then) or _feeds_back_a_mean(strategy.first)
    if isinstance(strategy, Route):
        return any(map(_feeds_back_a_mean, (*strategy.rules.values(), strategy.otherwise)))
    if isinstance(strategy, Cast):
        return _feeds_back_a_mean(strategy.inner)
    if not isinstance(strategy, ErrorFeedback):
        return False
    others = ("rule", "aggregate")
    options = [getattr(part, name) for part in parts(strategy) for name in others if hasattr(part, name)]
    return all(getattr(option, "__name__", "") == "mean" for option in options)


def _all_residuals(strategy: Strategy) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for leaf in named_states(strategy):
        if leaf.owner == "ErrorFeedback.memory":
            found |= leaf.state.state_dict()
    return found


def _decayed(strategy: Strategy) -> dict[str, Tensor]:
    """The residual is what ``decay`` left of it: the rest follows from that."""
    found: dict[str, Tensor] = {}
    for part in parts(strategy):
        if isinstance(part, ErrorFeedback) and part.decay != 1:
            state = part.memory.state_dict()
            found |= {name: tensor.double() * (1 / part.decay - 1) for name, tensor in state.items()}
    return found
