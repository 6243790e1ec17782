"""How much privacy the (sampled) Gaussian mechanism has used up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from ..core.numbers import is_number, is_whole
from ..core.world_change import Shared
from ..errors import InvalidValue

ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 80, 128, 256, 512, 1024)
UP, ONE_STEP = 1 + 1e-6, 1e-13  # above the error of the arithmetic: a bound is rounded up, never down
LEAST_NOISE = 0.1  # below this noise sampling is not credited: epsilon is in the thousands anyway

Mechanism = tuple[float, float]
"""Noise and sampling."""


def epsilon_of(noise: float, sampling: float, steps: int, delta: float) -> float:
    """The epsilon of ``steps`` steps for this delta, by Renyi differential privacy.

    RDP adds up over steps; for each order it converts to (epsilon, delta) as in Canonne, Kamath and Steinke
    (2020, proposition 12), and the smallest is the answer.
    """
    if not is_whole(steps) or steps < 0:
        raise InvalidValue(f"steps={steps!r}; use a whole number of steps from 0 up")
    return epsilon_of_all({(noise, sampling): steps}, delta)


def epsilon_of_all(runs: Mapping[Mechanism, int], delta: float) -> float:
    """The same for several mechanisms, one after the other on the same data: RDP adds up over them too."""
    if not is_number(delta) or not 0 < delta < 1:
        raise InvalidValue(f"delta={delta!r}; use a number above 0 and below 1, such as 1e-5")
    runs = {mechanism: steps for mechanism, steps in runs.items() if steps}
    if not runs:
        return 0.0
    if any(noise == 0 for noise, _ in runs):
        return math.inf
    found: list[float] = [
        sum(steps * renyi(noise, sampling, order) for (noise, sampling), steps in runs.items())
        + math.log1p(-1 / order)
        - (math.log(delta) + math.log(order)) / (order - 1)
        for order in ORDERS
    ]
    return max(0.0, min(found)) * UP


@lru_cache(maxsize=4096)
def renyi(noise: float, sampling: float, order: float) -> float:
    """The Renyi divergence of one step, for a contribution of norm 1.

    Without sampling it is order / (2 noise^2) (Mironov, 2017, proposition 7). With it (Mironov, Talwar and
    Zhang, 2019, section 3.1) it is log(A) / (order - 1), where A is the mean over z ~ N(0, noise^2) of
    (1 - q + q exp((2 z - 1) / (2 noise^2)))^order. The integral is a sum over equally spaced points: for an
    analytic function that falls off like this one its error vanishes exponentially with the spacing.
    """
    if sampling == 1 or noise < LEAST_NOISE:
        return float(order / (2 * noise**2))
    spacing = min(noise, noise**2) / 20  # the function's singularities are pi noise^2 off the real line
    z = np.arange(-40 * noise, order + 40 * noise, spacing)
    ratio = np.logaddexp(math.log1p(-sampling), math.log(sampling) + (2 * z - 1) / (2 * noise**2))
    terms = order * ratio - z**2 / (2 * noise**2)
    top = float(terms.max())
    scale = spacing / (noise * math.sqrt(2 * math.pi))
    log_mean = top + math.log(float(np.exp(terms - top).sum()) * scale)
    return (max(0.0, log_mean) + ONE_STEP) / (order - 1)


class Spent(Shared):
    """The ledger of one mechanism: how often it ran, and what was spent before it. A checkpoint holds it as
    numbers. See ledgers.py for what happens to it where a strategy is reset.

    What was sent cannot be taken back. So a step that all ranks skip together stays as they have counted it.
    A step that failed counts on all ranks, however far each has come: they must not differ.
    """

    undoable = False

    lasts: ClassVar[bool] = True
    """It is about the data, whatever model learns from it: nothing resets it."""

    def __init__(self, noise: float, sampling: float) -> None:
        self.noise_multiplier = noise
        self.sample_rate = sampling
        self.steps = 0
        self._before = 0  # steps before the current one
        self._earlier: dict[Mechanism, int] = {}  # by other strategies, read from a checkpoint
        self._followed: list[Spent] = []  # ledgers of strategies that trained the model before

    def keep(self) -> None:
        self._before = self.steps

    skip = keep

    def undo(self) -> None:
        self._before = self.steps = max(self.steps, self._before + 1)

    @property
    def mechanism(self) -> Mechanism:
        return self.noise_multiplier, self.sample_rate

    def runs(self) -> dict[Mechanism, int]:
        """All steps by their mechanism; those of earlier strategies too."""
        found = {self.mechanism: 0}
        for ledger in self._all():
            for mechanism, steps in ((ledger.mechanism, ledger.steps), *ledger._earlier.items()):
                found[mechanism] = found.get(mechanism, 0) + steps
        return found

    def follow(self, other: Spent) -> None:
        """From now on the steps of ``other`` count here too, once."""
        if other is not self and not any(ledger is other for ledger in self._followed):
            self._followed.append(other)

    def raise_to(self, runs: Mapping[Mechanism, int]) -> None:
        """Count at least these steps."""
        counted = self.runs()
        for mechanism, steps in runs.items():
            missing = max(0, steps - counted.get(mechanism, 0))
            if mechanism == self.mechanism:
                self._before = self.steps = self.steps + missing
            elif missing:
                self._earlier[mechanism] = self._earlier.get(mechanism, 0) + missing

    def _all(self) -> list[Spent]:
        """This ledger and all that it follows, each once: two strategies may follow each other."""
        found: list[Spent] = [self]
        for ledger in found:  # the list grows in the loop
            found += [other for other in ledger._followed if not any(other is known for known in found)]
        return found

    def state_dict(self) -> dict[str, Any]:
        own = {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
        }
        earlier = self.runs()
        earlier[self.mechanism] -= self.steps
        others = {f"{noise!r} {sampling!r}": steps for (noise, sampling), steps in earlier.items() if steps}
        return {**own, "earlier": others} if others else own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) - {"earlier"} != {"noise_multiplier", "sample_rate", "steps"}:
            raise InvalidValue(
                f"a privacy ledger holds noise_multiplier, sample_rate and steps, this one "
                f"{', '.join(state) or 'nothing'}; load the state that a Private has saved"
            )
        for name in ("noise_multiplier", "sample_rate"):
            if state[name] != getattr(self, name):
                raise InvalidValue(
                    f"the ledger was kept with {name}={state[name]!r}, this Private has "
                    f"{name}={getattr(self, name)!r}; its steps cannot be added to these"
                )
        steps, earlier = _counted(state["steps"]), dict(_read(state.get("earlier", {})))
        self.steps = self._before = steps
        self._earlier, self._followed = earlier, []

    def __repr__(self) -> str:
        return f"Spent({self.steps} steps)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spent)  # state does not count in comparisons

    __hash__ = None  # type: ignore[assignment]


def _counted(steps: object) -> int:
    if not is_whole(steps) or steps < 0:
        raise InvalidValue(f"the ledger counts {steps!r} steps; it must be a whole number from 0 up")
    return steps


def _read(earlier: object) -> Iterator[tuple[Mechanism, int]]:
    if not isinstance(earlier, Mapping):
        raise InvalidValue(
            f"the ledger has {earlier!r} as what was spent earlier; load what a Private has saved"
        )
    for text, steps in earlier.items():
        try:
            noise, sampling = map(float, text.split(" "))
        except ValueError:
            raise InvalidValue(f"the ledger has steps of {text!r}; it must be two numbers") from None
        if not (0 <= noise < math.inf and 0 < sampling <= 1):
            raise InvalidValue(f"the ledger has steps with noise {noise!r} and sampling {sampling!r}")
        yield (noise, sampling), _counted(steps)
