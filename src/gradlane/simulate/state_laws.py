"""Laws about state: it is saved, it is undone with its step, and no part of a gradient is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..core.strategy import Leaf, Strategy, is_undoable, named_states
from ..core.unsaved_state import unsaved_state
from ..strategies.text import describe
from .case import HALF, Case, first_difference
from .plain_state import difference, part_of, unsavable, without_zeros
from .ranks import Simulation


def all_state_is_saved(case: Case) -> Iterator[str]:
    """Tensors are in fields with a ``state_dict``."""
    ranks = case.ranks(min(case.worlds))
    case.run(ranks, 0, 1)
    yield from unsaved_state(ranks.strategies[0])


def a_resumed_run_is_the_same(case: Case) -> Iterator[str]:
    """Everything that outlives a step is in ``state_dict``, in a form that a checkpoint can hold."""
    world = case.several
    expected = case.run(case.ranks(world), 0, 2 * HALF)[HALF:]
    first, second = case.ranks(world), case.ranks(world)
    case.run(first, 0, HALF)
    for old, new in zip(first.strategies, second.strategies, strict=True):
        state = old.state_dict()
        if (message := unsavable(state)) is not None:
            yield message
            return
        for leaf in named_states(old):
            if wrong := leaf.fitting(part_of(state, leaf.path), case.slots)[1]:
                yield f"{leaf.owner}: {wrong[0]}; it can be saved, but not loaded again"
                return
        new.load_state_dict(copy.deepcopy(state))
    if (difference := first_difference(case.run(second, HALF, 2 * HALF), expected, HALF)) is not None:
        yield (
            f"{difference} after a stop in step {HALF}; keep everything that outlives a step in fields with "
            "a state_dict, such as gradlane.Memory"
        )


def an_undone_step_leaves_no_trace(case: Case) -> Iterator[str]:
    """After a step that failed or was skipped, all state is as before the step."""
    world = case.several
    disturbed, quiet = case.ranks(world), case.ranks(world)
    for step in range(HALF):
        leaves = [leaf for own in disturbed.strategies for leaf in named_states(own)]
        before = {index: leaf.state.state_dict() for index, leaf in enumerate(leaves)}
        _make_undoable(leaves)
        disturbed.steps = step
        disturbed.step(case.gradients(world, 100 + step))
        for index, leaf in enumerate(leaves):
            if is_undoable(leaf.state):
                leaf.state.undo()
            if getattr(leaf.state, "lasts", False):
                continue  # a privacy ledger: noise that was spent stays spent
            if difference(without_zeros(leaf.state.state_dict()), without_zeros(before[index])) is not None:
                yield f"{leaf.owner} is not as before a step that was undone; use a Memory, or keep and undo"
                return
        disturbed_results, quiet_results = (case.run(ranks, step, step + 1) for ranks in (disturbed, quiet))
        for leaf in leaves:
            if is_undoable(leaf.state):
                leaf.state.keep()
        if (where := first_difference(disturbed_results, quiet_results, step)) is not None:
            yield f"{where} after a step that was undone; keep nothing of a step outside of a Memory"
            return


def _make_undoable(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        if is_undoable(leaf.state):
            leaf.state.undoable = True


def other_ranks_can_go_on(case: Case) -> Iterator[str]:
    """A state can be carried over to another number of ranks, and the sum of the residuals stays the same."""
    sizes = sorted(case.worlds)[-2:]
    tolerance = _tolerance(case.strategy)
    for old, new in (sizes, sizes[::-1]) if len(sizes) == 2 else ():
        before, after = case.ranks(old), case.ranks(new)
        case.run(before, 0, HALF)
        saved = [own.state_dict() for own in before.strategies]
        for rank, own in enumerate(after.strategies):
            own.load_state_dict(own.carried(saved, rank, new))
        expected, found = _summed(case.residual, before), _summed(case.residual, after)
        for name, total in expected.items():
            if name not in found or not torch.allclose(found[name], total, rtol=1e-4, atol=tolerance):
                yield f"the sum of the residuals of {name!r} is different with {new} ranks than with {old}"
                return
        case.run(after, HALF, HALF + 1)


def _summed(
    of_one: Callable[[Strategy], Mapping[str, Tensor]] | None, ranks: Simulation
) -> Mapping[str, Tensor]:
    """By name, summed over the ranks."""
    total: dict[str, Tensor] = {}
    for tensors in map(of_one, ranks.strategies) if of_one is not None else ():
        for name, tensor in tensors.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return total


def nothing_is_lost(case: Case) -> Iterator[str]:
    """If there is a residual: what arrived, the residual, and what has decayed of it add up to the gradients
    of all steps."""
    for world in sorted({2, case.several} & set(case.worlds)) if case.residual is not None else ():
        ranks = case.ranks(world)
        missing = {name: torch.zeros(shape).double() for name, shape in case.shapes.items()}
        for step in range(2 * HALF):
            for own in case.gradients(world, step):
                _add(missing, own)
            ((mean, *_),) = case.run(ranks, step, step + 1)
            _add(missing, mean, -world)
            _add(missing, _summed(case.decayed, ranks), -1)
        _add(missing, _summed(case.residual, ranks), -1)
        for name, total in missing.items():
            off = total.abs().max().item() if total.numel() else 0.0
            if not off <= _tolerance(case.strategy) * math.sqrt(world * 2 * HALF):
                yield (
                    f"world={world}, {2 * HALF} steps: what arrived of {name!r} plus the residual is "
                    f"{off:.2g} away from the gradients; Reduced.sent must be what the other ranks saw, and "
                    "Reduced.mean the mean of that"
                )
                return


def _add(totals: dict[str, Tensor], tensors: Mapping[str, Tensor], times: int = 1) -> None:
    for name, tensor in tensors.items():
        totals[name].add_(tensor.double(), alpha=times)


def _tolerance(strategy: Strategy) -> float:
    """float16 and bfloat16, on the wire or in memory, round."""
    return 5e-2 if "float16" in describe(strategy) else 1e-5
