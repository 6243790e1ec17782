"""freeze_moments on real ranks: 1-bit Adam by the paper, with everything that a training has around it."""

import logging
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

import gradlane as gl
from gradlane.feed.adam_moments import BETA2
from gradlane.local import run_ranks
from gradlane.strategies.shards import shard_size

from ..reference.one_bit_adam import one_bit_adam
from ..support.grids import grid
from ..support.training import ComplexWeights, build, data, flat, replicas_equal

SMALL = {"bucket_cap_mb": 0.004}  # several buckets
ONE_BIT = "ErrorFeedback(Gathered(Sign(block=32)))"
NUMEL, BLOCK = 192, 32  # whole blocks: ``Sharded`` counts the padding of an answer as zeros


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.linspace(-1, 1, NUMEL))


def gradient(rank, step, theta):
    """Of a quadratic that is another one on each rank, with noise; five elements never have one."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    curvature = torch.linspace(0.1, 3, NUMEL).roll(17 * rank)
    found = curvature * (theta.float() - 0.3 * rank) + torch.randn(NUMEL, generator=generator)
    found[:5] = 0
    return found


OPTIONS = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}


def on_the_vector(rank, then, steps, warmup):
    model = Vector()
    optimizer = AdamW(model.parameters(), weight_decay=0.1, **OPTIONS)
    seen = []
    with gl.attach_without_ddp(model, "Mean()", timeout=30) as attachment:
        gl.freeze_moments(optimizer, attachment, after=warmup, then=then)
        for step in range(steps):
            model.theta.grad = gradient(rank, step, model.theta.detach())
            gl.reduce_gradients(model)
            optimizer.step()
            seen.append(model.theta.detach().clone())
    return seen


@pytest.mark.parametrize(
    ("exchange", "world"),
    grid(["Gathered", "Sharded"], [2, 3, 4], quick=[("Gathered", 2), ("Sharded", 3), ("Sharded", 4)]),
)
def test_is_one_bit_adam_by_the_formulas_of_the_paper(exchange, world):
    steps, warmup = 24, 6
    size = shard_size(NUMEL, world, BLOCK)
    shards = [slice(rank * size, (rank + 1) * size) for rank in range(world)]
    expected = one_bit_adam(
        gradient, Vector().theta.detach(), ranks=world, steps=steps, warmup=warmup, decay=0.1, block=BLOCK,
        shards=shards if exchange == "Sharded" and world > 2 else None, **OPTIONS,
    )  # fmt: skip
    then = f"ErrorFeedback({exchange}(Sign(block={BLOCK})))"
    for seen in run_ranks(on_the_vector, world, then, steps, warmup):
        for step, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
            torch.testing.assert_close(
                got.double(), wanted, rtol=1e-4, atol=1e-5, msg=lambda text, at=step: f"step {at}: {text}"
            )


def groups_of(model):
    """Groups that differ in everything."""
    weights = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [
        {"params": weights, "lr": 1e-2, "betas": (0.9, 0.99)},
        {"params": others, "lr": 3e-2, "betas": (0.7, 0.95), "eps": 1e-5, "weight_decay": 0.0},
    ]


def adamw_of(model, **mode):
    return AdamW(groups_of(model), **mode)


def adam_of(model):
    return Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(rank, make, *, moving, own_loop=False, model=build, dtype=torch.float32, steps=12, after=5,
          then="Mean()", refresh=None, schedule=None):  # fmt: skip
    """The weights at the end. Without ``moving``, gradients are sent and the optimizer keeps its momentum."""
    module = model() if model is ComplexWeights else model(dtype=dtype)
    ddp = module if own_loop else DistributedDataParallel(module, **SMALL)
    optimizer = make(module)
    scheduler = schedule and schedule(optimizer)
    attach = gl.attach_without_ddp if own_loop else gl.attach
    with attach(ddp, "Mean()", timeout=30, verify_every=2) as attachment:
        if moving:
            gl.freeze_moments(optimizer, attachment, after=after, then=then, refresh=refresh)
        for step in range(steps):
            optimizer.zero_grad()
            loss = ddp(data(rank, step, dtype))
            (-loss if optimizer.param_groups[0]["maximize"] else loss).backward()
            if own_loop:
                gl.reduce_gradients(ddp)
            if not moving and step == after:
                gl.freeze_moments(optimizer)
            optimizer.step()
            if scheduler:
                scheduler.step()
        frozen = optimizer.param_groups[0]["betas"][1] == BETA2
    return flat(p.detach() for p in module.parameters()), frozen


def lambda_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


CASES = {
    "plain": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
}


def as_dense(rank, cases):
    found = {}
    for case in cases:
        make = partial(adamw_of, **CASES[case])
        found[case] = [train(rank, make, moving=moving) for moving in (False, True)]
    return found


def close(a, b, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_carried_densely_it_is_adam_with_frozen_moments():
    """Whatever the groups and the mode: what moves the momentum must not change the training."""
    for found in run_ranks(as_dense, 2, list(CASES), deadline=120):
        for (dense, frozen), (moved, moved_frozen) in found.values():
            assert frozen
            assert moved_frozen
            close(moved, dense)


def in_other_ways(rank):
    """Own loops, a schedule, other dtypes: pairs of a control and the same with momentum that travels."""
    ways = {
        "own loop": (adamw_of, {"own_loop": True}),
        "schedule": (adamw_of, {"schedule": lambda_schedule}),
        "bf16": (adam_of, {"dtype": torch.bfloat16}),
        "fp64": (adam_of, {"dtype": torch.float64}),
    }
    return {
        name: [train(rank, make, moving=moving, **options)[0] for moving in (False, True)]
        for name, (make, options) in ways.items()
    }


def test_own_loops_schedules_and_other_widths():
    for found in run_ranks(in_other_ways, 2, deadline=120):
        for name, (dense, moved) in found.items():
            tolerance = 0.05 if name == "bf16" else 1e-5
            close(moved, dense, rtol=tolerance, atol=tolerance)


def complex_weights(rank):
    found = []
    for moving in (False, True):
        module = build(ComplexWeights)
        optimizer = Adam(module.parameters(), lr=1e-2)
        with gl.attach_without_ddp(module, "Mean()", timeout=30) as attachment:
            if moving:
                gl.freeze_moments(optimizer, attachment, after=3, then="Mean()")
            for step in range(8):
                optimizer.zero_grad()
                module(data(rank, step)).backward()
                gl.reduce_gradients(module)
                if not moving and step == 3:
                    gl.freeze_moments(optimizer)
                optimizer.step()
        found.append(flat(p.detach() for p in module.parameters()))
    return found


def test_complex_parameters():
    for dense, moved in run_ranks(complex_weights, 2):
        close(moved, dense)


def two_models(rank):
    """Each has its own optimizer, attachment and momentum; alone or beside the other is the same."""

    def make(seed):
        ddp = DistributedDataParallel(build(seed=seed), **SMALL)
        optimizer = AdamW([p for p in ddp.parameters() if p.requires_grad], lr=1e-2)
        attachment = gl.attach(ddp, "Mean()", timeout=30)
        gl.freeze_moments(optimizer, attachment, after=2 + seed, then=ONE_BIT)
        return ddp, optimizer

    def step_of(pair, step):
        pair[1].zero_grad()
        pair[0](data(rank, step)).backward()
        pair[1].step()

    both, alone = [make(0), make(1)], [make(0), make(1)]
    for step in range(6):
        for pair in both:
            step_of(pair, step)
    for pair in alone:
        for step in range(6):
            step_of(pair, step)
    pairs = zip(both, alone, strict=True)
    return [torch.equal(flat(a.parameters()), flat(b.parameters())) for (a, _), (b, _) in pairs]


def test_two_models_do_not_know_of_each_other():
    assert run_ranks(two_models, 2) == [[True, True]] * 2


class Lines(logging.Handler):
    """What was logged in this process."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("gradlane").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def with_zeros(rank):
    """A model with a part that never gets a gradient before step 6; a refresh there lets it come alive."""
    found, log = {}, Lines()
    for refresh in (None, 2):
        torch.manual_seed(0)
        module = nn.Embedding(6, 32)
        start = module.weight.detach().clone()
        optimizer = Adam(module.parameters(), lr=1e-2)
        with gl.attach_without_ddp(module, "Mean()", timeout=30) as attachment:
            gl.freeze_moments(optimizer, attachment, after=4, then=ONE_BIT, refresh=refresh)
            for step in range(16):
                rows = torch.tensor([0, 1, 2] if step < 6 else [0, 1, 2, 5])
                optimizer.zero_grad()
                (module(rows) - rank).square().mean().backward()
                gl.reduce_gradients(module)
                optimizer.step()
        moved = (module.weight.detach() != start).any(1).tolist()
        largest = (module.weight.detach() - start).abs().max().item()
        found[refresh] = moved, largest, replicas_equal(module.parameters())
    return found, [line for line in log.lines if "never had" in line]


def test_elements_without_a_gradient_do_not_move_and_a_refresh_lets_them():
    for found, lines in run_ranks(with_zeros, 2):
        words = (
            "96 elements have never had a gradient, in weight (96 of 192); their second moment is 0, so they "
        )
        assert words + "stay where they are" in lines[0]
        assert lines[1].endswith("stay where they are until a refresh meets a gradient of theirs")
        assert found[None][0] == [True, True, True, False, False, False]
        assert found[2][0] == [True, True, True, False, False, True]
        for _, largest, equal in found.values():
            assert largest < 1.0  # nothing was divided by eps
            assert equal


def refreshed(rank):
    """A refresh is a dense step of Adam: with dense momentum in between, close to Adam that never froze."""
    schedule = gl.After(5, gl.Mean(), refresh=2)
    steps = [step for step in range(5, 30) if schedule.is_first(step)]
    weights, frozen = train(rank, adamw_of, moving=True, steps=30, refresh=2)
    never, _ = train(rank, adamw_of, moving=True, steps=30)
    adam, _ = train(rank, adamw_of, moving=False, steps=30, after=99)
    return steps, frozen, (weights - adam).norm().item(), (never - adam).norm().item()


def test_refreshes_follow_adam():
    for steps, frozen, refreshed_far, never_far in run_ranks(refreshed, 2, deadline=120):
        assert steps == [6, 10, 14, 22]
        assert frozen
        assert 0 < refreshed_far < never_far


def skipping(rank, how):
    """Overflows just before the freeze, at it and after it; a run without them must have the same weights."""
    found = []
    for overflows in ((), (3, 4, 6)):
        ddp = DistributedDataParallel(build(), **SMALL)
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        optimizer = AdamW(parameters, lr=1e-2, fused=how == "fused scaler")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in how)
        kept = 0
        with gl.attach(ddp, "Mean()", timeout=30, scaler=scaler if "scaler" in how else None) as attachment:
            # A run without skips freezes as many steps earlier as the other one has skipped by then.
            gl.freeze_moments(optimizer, attachment, after=4 if overflows else 3, then=ONE_BIT)
            for step in range(11 if overflows else 8):
                optimizer.zero_grad()
                loss = ddp(data(rank, 0 if step in overflows else kept))
                if step in overflows:
                    loss = loss * (math.inf if rank == 0 else 1.0)
                else:
                    kept += 1
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append(
            (flat(p.detach() for p in ddp.parameters()), kept, float(optimizer.state[parameters[0]]["step"]))
        )
    return found


@pytest.mark.parametrize("how", ["skip", "scaler", "fused scaler"])
def test_a_skipped_step_counts_for_nothing(how):
    for without, skipped in run_ranks(skipping, 2, how):
        assert without[1:] == skipped[1:]
        assert without[1] == 8
        assert torch.equal(without[0], skipped[0])


def resumed(rank, folder, after, first, last, refresh, load_first, own_loop):
    """Steps ``first`` to ``last`` of one training. The same script begins it and goes on with it."""
    module = build()
    ddp = module if own_loop else DistributedDataParallel(module, **SMALL)
    optimizer = AdamW(groups_of(module))
    schedule = lambda_schedule(optimizer)
    attach = gl.attach_without_ddp if own_loop else gl.attach
    with attach(ddp, "Sharded(Int8(block=32))", timeout=30) as attachment:
        if load_first and first:
            model, inner, lr = torch.load(f"{folder}/model", weights_only=True)
            optimizer.load_state_dict(inner)
        gl.freeze_moments(optimizer, attachment, after=after, then=ONE_BIT, refresh=refresh)
        if first:
            model, inner, lr = torch.load(f"{folder}/model", weights_only=True)
            module.load_state_dict(model)
            optimizer.load_state_dict(inner)
            schedule.load_state_dict(lr)
            attachment.load(f"{folder}/attachment")
        for step in range(first, last):
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            if own_loop:
                gl.reduce_gradients(ddp, "Sharded(Int8(block=32))", timeout=30)
            optimizer.step()
            schedule.step()
        attachment.save(f"{folder}/attachment")
        if rank == 0:
            torch.save(
                (module.state_dict(), optimizer.state_dict(), schedule.state_dict()), f"{folder}/model"
            )
    return flat(p.detach() for p in module.parameters())


RUNS = {
    "frozen at 4": (4, None, False, False),
    "frozen at 8": (8, None, False, False),
    "frozen as it is saved": (5, None, True, True),
    "with refreshes": (3, 2, False, True),
}


@pytest.mark.parametrize("case", RUNS)
def test_twelve_steps_are_five_and_seven_in_new_processes(case, tmp_path):
    after, *options = RUNS[case]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_ranks(resumed, 2, str(tmp_path / "whole"), after, 0, 12, *options)
    run_ranks(resumed, 2, str(tmp_path / "parts"), after, 0, 5, *options)
    parts = run_ranks(resumed, 2, str(tmp_path / "parts"), after, 5, 12, *options)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_goes_on_with_another_number_of_ranks(tmp_path):
    run_ranks(resumed, 3, str(tmp_path), 4, 0, 6, None, False, False)
    first, second = run_ranks(resumed, 2, str(tmp_path), 4, 6, 9, None, False, False)
    assert torch.equal(first, second)


def called_again(rank):
    """Once more in the middle, with the same codec and with another one."""
    found = []
    for again in (None, ONE_BIT, "ErrorFeedback(Gathered(Int4(block=32)))"):
        module = build()
        optimizer = adamw_of(module)
        with gl.attach_without_ddp(module, "Mean()", timeout=30) as attachment:
            gl.freeze_moments(optimizer, attachment, after=3, then=ONE_BIT)
            for step in range(8):
                if step == 6 and again:
                    before = attachment.state_dict()["state"]
                    gl.freeze_moments(optimizer, attachment, after=3, then=again)
                    after = attachment.state_dict()["state"]
                    assert flat(before["then"]["memory"].values()).equal(
                        flat(after["then"]["memory"].values())
                    )
                    residuals = [part["then"]["inner"]["memory"].values() for part in (before, after)]
                    assert torch.equal(*map(flat, residuals))
                optimizer.zero_grad()
                module(data(rank, step)).backward()
                gl.reduce_gradients(
                    module, "Mean()", timeout=30
                )  # the strategy of the first call is still fine
                optimizer.step()
        found.append(flat(p.detach() for p in module.parameters()))
    return found


def test_a_second_call_keeps_momentum_and_residual():
    for once, again, other in run_ranks(called_again, 2):
        assert torch.equal(once, again)
        assert not torch.equal(once, other)
