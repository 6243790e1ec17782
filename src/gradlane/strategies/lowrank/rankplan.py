"""Which rank each matrix has under a budget, by what its ranks were seen to carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.world_change import Shared
from ...errors import InvalidValue
from ...kernels.products import row_squares
from .budget import Layer, Passed
from .knapsack import Item, ranks_within
from .matrices import Cut, Matrix, Rank, View, cut, matrices_of, most_rank

LOOKS = 10  # at the energies, between two decisions
NEWEST = 0.3  # weight of the newest look in their average
KEPT = ("decided", "step", "numel", "dense", "cost", "most", "rank", "energy")


class RankPlan(Shared):
    """Ranks within ``share`` of the elements, decided anew every ``every`` steps without a message more.

    P is orthonormal and all ranks know Q, so the square of row k of Q is the energy that rank k carried,
    and the first s rows carry what rank s would have. What lies beyond the rank in force nobody sees:
    it is taken to fall like 1 / k from the last that was seen, and the next decision corrects it. (Squared
    norms of the ranks' own gradients would not help: they are mostly noise that the mean does not have.)

    A decision uses the steps before it, and is made at the first bucket of a step. Until the first one all
    matrices have one rank, as far as the buckets that have come by then allow; a dense bucket that comes
    last may go beyond the share in the very first step, and never again.
    """

    shared = True  # all ranks see the same figures, and decide alike

    def __init__(self, share: float, every: int) -> None:
        self.share, self.every = share, every
        self.ranks: dict[str, int] = {}
        self.energy: dict[str, list[float]] = {}
        self._decided, self._step = 0, -1
        self._whole, self._now = Passed(), Passed()
        self.undoable = False
        self._before: dict[str, Any] | None = None  # as it was before the step under way

    def ranks_at(self, bucket: Bucket, layers: Mapping[str, Layer], dense: int) -> dict[str, int]:
        """The ranks of a bucket's matrices; ``dense`` elements of it travel as they are."""
        if bucket.step != self._step:
            self._begin(bucket.step)
        self._now.add(bucket.flat.numel(), dense, layers)
        if bucket.is_last:
            self._now.check(self.share)
        if fresh := [name for name in layers if name not in self.ranks]:
            self.ranks |= self._now.same_rank(self.share, self.ranks, fresh)
        return {name: self.ranks[name] for name in layers}

    def saw(self, bucket: Bucket, averaged: Sequence[tuple[Matrix, Tensor]]) -> None:
        """The averaged Q of matrices in this step, which all ranks have alike."""
        if bucket.step % max(1, self.every // LOOKS) or bucket.flat.device.type == "meta":
            return
        for matrix, q in averaged:
            seen: list[float] = row_squares(q).tolist()
            if all(map(math.isfinite, seen)):
                old = self.energy.get(matrix.name, [])
                both = [o + NEWEST * (s - o) for o, s in zip(old, seen, strict=False)]
                self.energy[matrix.name] = both + seen[len(both) :] + old[len(seen) :]

    def in_force(self) -> dict[str, int]:
        return {name: self.ranks[name] for name in self._last().layers}

    def _last(self) -> Passed:
        """The last whole step; one with fewer elements than the one before has broken off."""
        return self._now if self._now.numel >= self._whole.numel else self._whole

    def keep(self) -> None:
        self._before = None

    def undo(self) -> None:
        """A step that failed may have come further on some ranks; they must decide alike afterwards."""
        if self._before is not None:
            vars(self).update(self._before)
        self._before = None

    def _begin(self, step: int) -> None:
        if self.undoable:
            self._before = {**vars(self), "ranks": dict(self.ranks), "energy": dict(self.energy)}
        self._whole, self._now, self._step = self._last(), Passed(), step
        if not self._whole.numel:
            self._decided = step
            return
        self._whole.check(self.share)
        over = self._whole.spent(self.ranks) > self._whole.allowed(self.share)
        if over or step - self._decided >= self.every:
            self._decide(step)

    def _decide(self, step: int) -> None:
        layers, self._decided = self._whole.layers, step
        if layers:
            items = [Item(cost, self._gains(name, most)) for name, (cost, most) in layers.items()]
            room = self._whole.allowed(self.share) - self._whole.dense
            self.ranks = dict(zip(layers, ranks_within(items, room), strict=True))
        self.energy = {name: self.energy[name] for name in layers if name in self.energy}

    def _gains(self, name: str, most: int) -> list[float]:
        """What each rank carries: as seen, as seen when there were more of them, as expected."""
        energy, rank = self.energy.get(name, [0.0]), self.ranks[name]
        seen = sorted(energy[:rank], reverse=True)
        seen += [min(seen[-1], old) for old in energy[rank:]]
        expected = [seen[-1] * len(seen) / k for k in range(len(seen) + 1, most + 1)]
        return (seen + expected)[:most]

    def state_dict(self) -> dict[str, Any]:
        if not (last := self._last()).numel:
            return {}
        numbers = (self._decided, self._step, last.numel, last.dense)
        costs, mosts = ({n: layer[i] for n, layer in last.layers.items()} for i in range(2))
        energy = {name: torch.tensor(seen, dtype=torch.float64) for name, seen in self.energy.items()}
        return dict(zip(KEPT, (*numbers, costs, mosts, dict(self.ranks), energy), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__init__(self.share, self.every)  # type: ignore[misc]
        if not state:
            return
        if set(state) != set(KEPT):
            raise InvalidValue(f"the state of ranks has {sorted(state)}; it must have {', '.join(KEPT)}")
        if not _bounded(state):
            raise InvalidValue("the state of ranks is damaged; pass what state_dict() gave")
        self._decided, self._step = state["decided"], state["step"]
        layers = {name: Layer(cost, state["most"][name]) for name, cost in state["cost"].items()}
        self._now.add(state["numel"], state["dense"], layers)
        self.ranks = dict(state["rank"])
        self.energy = {name: seen.tolist() for name, seen in state["energy"].items()}

    def __repr__(self) -> str:
        return f"RankPlan({len(self.ranks)} matrices)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankPlan)  # state is no option

    __hash__ = None  # type: ignore[assignment]


def _bounded(state: Mapping[str, Any]) -> bool:
    numbers = [state[name] for name in KEPT[:4]]
    numbers += [number for name in KEPT[4:7] for number in state[name].values()]
    return (
        all(type(number) is int for number in numbers)
        and set(state["cost"]) == set(state["most"]) <= set(state["rank"])
        and all(
            isinstance(seen, Tensor)
            and seen.dim() == 1
            and seen.dtype == torch.float64
            and bool(seen.isfinite().all())
            for seen in state["energy"].values()
        )
    )


def cut_within(
    plan: RankPlan, bucket: Bucket, rank: Rank, least_rate: float, view: View, iterations: int
) -> Cut:
    """As ``cut``, with the plan's ranks: ``rank`` is the largest that a matrix may have."""
    layers, dense = {}, bucket.flat.numel()
    for matrix in matrices_of(bucket, view):
        if most := most_rank(matrix, rank, least_rate):
            layers[matrix.name] = Layer((matrix.rows + matrix.columns) * iterations, most)
            dense -= matrix.rows * matrix.columns
    ranks = plan.ranks_at(bucket, layers, dense)
    return cut(bucket, lambda name, shape: ranks.get(name, 0), least_rate, view)
