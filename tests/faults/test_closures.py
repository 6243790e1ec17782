"""Skipped steps and optimizers of every kind (R8): with a closure, in which backward runs, and without."""

import copy
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, RMSprop

import gradlane as gl
from gradlane.local import run_ranks

from ..laws.test_undo import equal
from ..support.training import build, data, replicas_equal
from .test_nonfinite import SMALL, Injected

STEPS, BAD = 5, 2


class Overrides(SGD):
    """A step of one's own, round that of torch."""

    def step(self, closure=None):
        return super().step(closure)


class EvaluatesItself(Adam):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        super().step()
        return loss


ONCE = {
    "sgd": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd fused": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: Adam(p, 0.01, weight_decay=0.1),
    "adam foreach": lambda p: Adam(p, 0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda p: AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.5),
    "overrides step": lambda p: Overrides(p, 0.05, momentum=0.9),
    "evaluates itself": lambda p: EvaluatesItself(p, 0.01),
}

HALVED = ("sgd", "adam", "evaluates itself")  # also with two optimizers, each for some of the parameters


def by_keyword(optimizer, closure):
    optimizer.step(closure=closure)


def by_position(optimizer, closure):
    optimizer.step(closure)


def before_the_step(optimizer, closure):
    closure()
    optimizer.step()


WAYS = (by_keyword, by_position, before_the_step)


def train(rank, make, way, *, bad=True, halves=False):
    """Weights and state after five steps, and whether the bad one left all as it was; or without it."""
    ddp = DistributedDataParallel(build(), **SMALL)
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    shares = [parameters[::2], parameters[1::2]] if halves else [parameters]
    optimizers = [make(share) for share in shares]
    injected = Injected(ddp.module, rank, [(BAD, 1, 3, math.nan)] if bad else [])
    kept = []
    with gl.attach(ddp, "Mean()", timeout=30) as attachment:
        for step in range(STEPS):
            injected.step = step
            if step == BAD and not bad:
                continue

            def closure(step=step):
                ddp.zero_grad()
                loss = ddp(data(rank, step))
                loss.backward()
                return loss

            before = [p.detach().clone() for p in parameters], [told(o) for o in optimizers]
            way(optimizers[0], closure)
            for other in optimizers[1:]:
                other.step()
            after = list(parameters), [told(o) for o in optimizers]
            kept.append(all(map(torch.equal, before[0], after[0])) and equal(before[1], after[1]))
        counted = attachment.metrics()["comm/skipped"]
        return [p.detach().clone() for p in parameters], kept, replicas_equal(parameters), counted


def told(optimizer):
    return optimizer.state_dict()["state"]


def every_way(rank, world):
    found = {}
    for name, make in ONCE.items():
        clean = train(rank, make, before_the_step, bad=False)[0]
        for way in WAYS:
            for halves in (False, True) if name in HALVED else (False,):
                weights, kept, alike, counted = train(rank, make, way, halves=halves)
                found[name, way.__name__, halves] = (
                    all(map(torch.equal, weights, clean)), kept, alike, counted,
                )  # fmt: skip
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_skipped_step_is_not_taken_whoever_runs_backward(world):
    for found in run_ranks(every_way, world, world, deadline=300):
        for how, outcome in found.items():
            assert outcome == (True, [step == BAD for step in range(STEPS)], True, 1), how


def without_its_own(rank):
    """In which steps, one of them skipped, the optimizer of another model has changed it."""
    ddp = DistributedDataParallel(build(), **SMALL)
    other = torch.nn.Linear(4, 4)
    injected = Injected(ddp.module, rank, [(1, 0, 0, math.nan)])
    optimizers = [SGD(model.parameters(), 0.1) for model in (ddp, other)]
    changed = []
    with gl.attach(ddp, "Mean()", timeout=30):
        for injected.step in range(3):
            before = other.weight.detach().clone()
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddp(data(rank, 0)).backward()
            other(torch.ones(1, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            changed.append(not torch.equal(before, other.weight))
    return changed


def test_other_optimizers_are_left_alone():
    assert run_ranks(without_its_own, 2) == [[True] * 3] * 2


class OwnLBFGS(torch.optim.LBFGS):
    """A step of one's own, round that of torch: torch calls hooks for both."""

    def step(self, closure):
        return super().step(closure)


def lbfgs(rank, search, at, count, make=torch.optim.LBFGS):
    """LBFGS evaluates its closure many times in a step, and goes by the loss: all ranks need the same one.
    ``at`` counts evaluations. Whether each step has changed anything, and how many were skipped in it."""
    ddp = DistributedDataParallel(build(), **SMALL)
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = make(parameters, lr=0.1, max_iter=4, line_search_fn=search)
    injected = Injected(ddp.module, rank, [(at, 1, 3, math.nan)])
    changed = []
    with gl.attach(ddp, "Mean()", timeout=30) as attachment:

        def closure():
            injected.step = attachment.step
            optimizer.zero_grad()
            loss = ddp(data(rank, 0))
            loss.backward()
            torch.distributed.all_reduce(mean := loss.detach().clone())
            return mean

        for _ in range(count):
            before = [p.detach().clone() for p in parameters], state_of(optimizer)
            skipped = attachment.metrics()["comm/skipped"]
            optimizer.step(closure)
            same = all(map(torch.equal, before[0], parameters)) and equal(before[1], state_of(optimizer))
            changed.append((not same, attachment.metrics()["comm/skipped"] - skipped))
        finite = all(p.isfinite().all() for p in parameters)
        return changed, bool(finite), injected.fired + (rank == 0), replicas_equal(parameters)


def state_of(optimizer):
    """As it is now: LBFGS writes to its own tensors, and lists."""
    return [copy.deepcopy(state) for state in optimizer.state.values()]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("at", [0, 6])  # the first evaluation of all; one in the middle of a step
@pytest.mark.parametrize("make", [torch.optim.LBFGS, OwnLBFGS])
def test_lbfgs_undoes_the_step_in_which_an_evaluation_was_skipped(search, at, make):
    torch.optim.LBFGS([torch.zeros(1)])  # so that torch has found its step
    for changed, finite, fired, alike in run_ranks(lbfgs, 2, search, at, 4, make):
        assert fired == 1
        assert finite
        assert alike
        assert sum(skips for _, skips in changed) == 1
        assert all(moved != bool(skips) for moved, skips in changed)


class Moves(SGD):
    """Sharpness-aware: it moves the weights, and evaluates there."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.01)
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.01)
        super().step()
        return loss


def moves(rank):
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = Moves([p for p in ddp.parameters() if p.requires_grad], 0.1)
    injected = Injected(ddp.module, rank, [(5, 1, 3, math.nan)])
    with gl.attach(ddp, "Mean()", timeout=30) as attachment:

        def closure():
            injected.step = attachment.step
            optimizer.zero_grad()
            loss = ddp(data(rank, 0))
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure)
        with pytest.raises(gl.NonFinite, match="Moves has moved the weights before its closure"):
            optimizer.step(closure)
    return True


def test_a_step_that_cannot_be_withheld_raises_on_all_ranks():
    assert run_ranks(moves, 2) == [True, True]


def raising(rank, make):
    """With ``nonfinite="raise"``: the error comes out of the optimizer's step, and weights are as before."""
    ddp = DistributedDataParallel(build(), **SMALL)
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = make(parameters)
    injected = Injected(ddp.module, rank, [(2, 1, 3, math.nan)])
    with gl.attach(ddp, "Mean()", timeout=30, nonfinite="raise") as attachment:

        def closure():
            injected.step = attachment.step
            optimizer.zero_grad()
            loss = ddp(data(rank, 0))
            loss.backward()
            return loss.detach()

        before = state_of(optimizer), [p.detach().clone() for p in parameters]
        while attachment.step < 3:
            try:
                optimizer.step(closure)
            except gl.NonFinite:
                same = equal(state_of(optimizer), before[0]) and all(map(torch.equal, before[1], parameters))
                optimizer.step()  # without backward: there are no gradients
                return same and all(map(torch.equal, before[1], parameters))
            before = state_of(optimizer), [p.detach().clone() for p in parameters]
    return None


class Once(torch.optim.LBFGS):
    """Also without a closure, so that the test can ask it to."""

    def step(self, closure=lambda: torch.tensor(0.0)):
        return super().step(closure)


@pytest.mark.parametrize("make", [ONCE["adam"], lambda p: Once(p, lr=0.1, max_iter=4)], ids=["adam", "lbfgs"])
def test_an_error_out_of_a_closure_leaves_the_weights(make):
    assert run_ranks(raising, 2, make) == [True, True]
