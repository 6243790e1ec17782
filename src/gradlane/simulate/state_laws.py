"""Laws of what outlives a step: saved whole, undone with its step, conserved."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..core.strategy import Leaf, Strategy, is_undoable, named_states
from ..core.unsaved_state import unsaved_state
from ..core.world_change import Expected, Fits
from ..strategies.text import describe
from .case import HALF, Case, first_difference
from .plain_state import difference, part_of, unsavable, without_zeros
from .ranks import Simulation


def nothing_is_kept_where_nobody_saves_it(case: Case) -> Iterator[str]:
    ranks = case.ranks(min(case.worlds))
    case.run(ranks, 0, 1)
    yield from unsaved_state(ranks.strategies[0])


def a_resumed_run_is_the_whole_run(case: Case) -> Iterator[str]:
    """All that outlives a step is in ``state_dict``, which holds what a checkpoint can hold."""
    world = case.several
    expected = case.run(case.ranks(world), 0, 2 * HALF)[HALF:]
    first, second = case.ranks(world), case.ranks(world)
    case.run(first, 0, HALF)
    slots = {name: Expected(torch.Size(shape), torch.float32) for name, shape in case.shapes.items()}
    for old, new in zip(first.strategies, second.strategies, strict=True):
        state = old.state_dict()
        if (told := unsavable(state)) is not None:
            yield told
            return
        for leaf in named_states(old):
            if isinstance(leaf.state, Fits) and (
                wrong := leaf.state.fitting(part_of(state, leaf.path), slots)[1]
            ):
                yield f"{leaf.owner}: {wrong[0]}; it could be saved, and not be loaded again"
                return
        new.load_state_dict(copy.deepcopy(state))
    if (told := first_difference(case.run(second, HALF, 2 * HALF), expected, HALF)) is not None:
        yield (
            f"{told} after a stop in step {HALF}; keep all that outlives a step in fields with a state_dict: "
            "a gradlane.Memory, say"
        )


def an_undone_step_leaves_no_trace(case: Case) -> Iterator[str]:
    """A step that fails, or is skipped, is as if it had never been."""
    world = case.several
    disturbed, quiet = case.ranks(world), case.ranks(world)
    for step in range(HALF):
        leaves = [leaf for own in disturbed.strategies for leaf in named_states(own)]
        before = {index: leaf.state.state_dict() for index, leaf in enumerate(leaves)}
        _undoable(leaves)
        disturbed.steps = step
        disturbed.step(case.gradients(world, 100 + step))
        for index, leaf in enumerate(leaves):
            if is_undoable(leaf.state):
                leaf.state.undo()
            if getattr(leaf.state, "lasts", False):
                continue  # a ledger: what was sent cannot be taken back
            if difference(without_zeros(leaf.state.state_dict()), without_zeros(before[index])) is not None:
                yield f"{leaf.owner} is not as before a step that was undone; use a Memory, or keep and undo"
                return
        disturbed_answers, quiet_answers = (case.run(ranks, step, step + 1) for ranks in (disturbed, quiet))
        for leaf in leaves:
            if is_undoable(leaf.state):
                leaf.state.keep()
        if (told := first_difference(disturbed_answers, quiet_answers, step)) is not None:
            yield f"{told} after a step that was undone; keep nothing of a step outside of a Memory"
            return


def _undoable(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        if is_undoable(leaf.state):
            leaf.state.undoable = True


def other_ranks_can_go_on(case: Case) -> Iterator[str]:
    """A state says what becomes of it with another number of ranks; of a residual nothing is lost."""
    sizes = sorted(case.worlds)[-2:]
    for old, new in (sizes, sizes[::-1]) if len(sizes) == 2 else ():
        before, after = case.ranks(old), case.ranks(new)
        case.run(before, 0, HALF)
        saved = [own.state_dict() for own in before.strategies]
        for rank, own in enumerate(after.strategies):
            own.load_state_dict(own.carried(saved, rank, new))
        had, has = _residuals(case, before), _residuals(case, after)
        for name, total in had.items():
            if name not in has or not torch.allclose(has[name], total, rtol=1e-4, atol=_slack(case.strategy)):
                yield f"the residual of {name!r} is another one with {new} ranks than with {old}, in sum"
                return
        case.run(after, HALF, HALF + 1)


def _residuals(case: Case, ranks: Simulation) -> Mapping[str, Tensor]:
    """Summed over the ranks."""
    total: dict[str, Tensor] = {}
    residual = case.residual or (lambda own: {})
    for own in ranks.strategies:
        for name, tensor in residual(own).items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return total


def nothing_is_lost(case: Case) -> Iterator[str]:
    """Where there is a residual: what arrived and the residual are what was given, summed over the steps."""
    for world in sorted({2, case.several} & set(case.worlds)) if case.residual is not None else ():
        ranks = case.ranks(world)
        given = [case.gradients(world, step) for step in range(2 * HALF)]
        arrived = case.run(ranks, 0, 2 * HALF)
        kept = _residuals(case, ranks)
        for name, shape in case.shapes.items():
            total = sum((own[name].double() for step in given for own in step), torch.zeros(shape).double())
            here = sum((world * step[0][name].double() for step in arrived), torch.zeros(shape).double())
            missing = total - here - kept.get(name, torch.zeros(()))
            off = missing.abs().max().item() if missing.numel() else 0.0
            if not off <= _slack(case.strategy) * math.sqrt(world * 2 * HALF):
                yield (
                    f"world={world}, {2 * HALF} steps: what arrived of {name!r} and the residual are "
                    f"{off:.2g} away from what was given; Reduced.sent must be what others saw, and their "
                    "mean the answer"
                )
                return


def _slack(strategy: Strategy) -> float:
    """Numbers of 8 bits of fraction on the wire or in memory are rounded."""
    return 5e-2 if "float16" in describe(strategy) else 1e-5
