"""A step that does not count leaves no trace, and a bad number never hides: over all strategies."""

import math

import pytest
import torch

from gradlane.core.strategy import is_undoable, named_states

from ..support.catalogue import EVERY
from ..support.grids import dealt, grid
from .test_laws import SHAPES, everyone, gradients, simulation

STAYS = ("spent",)  # what was sent cannot be taken back; test_private.py has the law of it
TOLERANT = tuple(name for name in EVERY if "Combined" in repr(EVERY[name]()))
"""They leave out ranks that are not finite, and go on."""
HIDE = ("function", "vote", "route", "raw gathered median", "median sharded", "random-k")
"""A maximum, a sign, a median, a choice that did not fall on it: the answer is finite all the same."""


def undoable(ranks):
    return [leaf.state for one in ranks.strategies for leaf in named_states(one) if is_undoable(leaf.state)]


def states(ranks):
    return [strategy.state_dict() for strategy in ranks.strategies]


def equal(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def substance(state, without=STAYS):
    """Without the privacy ledger, which stays; a memory of zeros is none."""
    if isinstance(state, torch.Tensor):
        return state if state.count_nonzero() else None
    if not isinstance(state, dict):
        return state
    inside = {key: substance(value, without) for key, value in state.items() if key not in without}
    return {key: value for key, value in inside.items() if value is not None} or None


@everyone
def test_every_state_can_be_undone(name):
    leaves = list(named_states(EVERY[name]()))
    assert all(is_undoable(leaf.state) for leaf in leaves), leaves


@pytest.mark.parametrize(("name", "bucket_bytes"), dealt(EVERY, (None, 64)))
def test_an_undone_step_leaves_no_trace(name, bucket_bytes):
    disturbed = simulation(name, 3, bucket_bytes=bucket_bytes)
    quiet = simulation(name, 3, bucket_bytes=bucket_bytes)
    for step in range(6):
        disturbed.steps = quiet.steps = step
        for state in undoable(disturbed):
            state.undoable = True
        if step in (0, 2, 3):
            before = list(map(substance, states(disturbed)))
            disturbed.step(gradients(3, 100 + step))
            for state in undoable(disturbed):
                state.undo()
            assert equal(list(map(substance, states(disturbed))), before)
            disturbed.steps = step
        answers = disturbed.step(gradients(3, step))
        for state in undoable(disturbed):
            state.keep()
        expected = quiet.step(gradients(3, step))
        for rank in range(3):
            assert all(torch.equal(answers[rank][key], expected[rank][key]) for key in SHAPES)
    assert equal(*(list(map(substance, states(ranks))) for ranks in (disturbed, quiet)))


@everyone
@pytest.mark.parametrize(
    ("bad", "at"),
    grid(
        [math.nan, math.inf, -math.inf],
        ["a.weight", "scale"],
        quick=[(math.nan, "scale"), (math.inf, "a.weight"), (-math.inf, "scale")],
    ),
)
def test_a_bad_number_is_seen_by_all_or_none(name, bad, at):
    """And where none sees it, the answer is as good as any: nothing that is residual or kept is lost by
    it."""
    ranks = simulation(name, 3)
    for step in range(3):
        given = gradients(3, step)
        if step == 1:
            given[1][at].view(-1)[-1] = bad
        answers = ranks.step(given)
        seen = [{key: bool(value.isfinite().all()) for key, value in answer.items()} for answer in answers]
        assert seen[0] == seen[1] == seen[2]
        if step == 1 and name not in TOLERANT + HIDE:
            assert not all(seen[0].values())
        for state in states(ranks):
            # The figures of ``Watch`` are of no step to come: they tell who was not finite in this one.
            assert all(tensor.isfinite().all() for tensor in tensors(substance(state, ("spent", "watch"))))


def tensors(state):
    if isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, torch.Tensor):
        yield state
