"""Real training with ranks that attack: robust rules stand it, the plain mean does not."""

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks
from gradlane.train.digits import DigitModel

from ..support import attacks
from ..support.attacks import ATTACKS, MOMENTUM, RATE, SEEDS, STRONG, WIDTH, Case, arms, loss_of
from ..support.training import replicas_equal

FAILED = 20  # points of accuracy
accuracy_of = functools.cache(Case.run)  # clean training is compared with over and over


def losses(world, f, arm, attack, seeds=SEEDS):
    found = {
        (case := Case(world, f, name, what, seed)): accuracy_of(case)
        for name, what in (("mean", None), (arm, attack))
        for seed in seeds
    }
    return loss_of(found, world, f, arm, attack, seeds)


@pytest.mark.parametrize("attack", ["inf", pytest.param("10x flip", marks=pytest.mark.slow)])
def test_one_of_four_in_one_seed(attack):
    assert losses(4, 1, "NNM + trimmed mean", attack, SEEDS[:1]) <= 1
    assert losses(4, 1, "mean", attack, SEEDS[:1]) >= FAILED


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("arm", [arm for arm in arms(1) if arm != "mean"])
@pytest.mark.parametrize(("world", "f"), [(4, 1), (10, 2)])
def test_a_quarter_of_wrong_ranks_costs_a_point_at_most(world, f, arm, attack):
    assert losses(world, f, arm, attack) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_four_of_ten_cost_two_points_at_most_after_mixing(attack):
    assert losses(10, 4, "NNM + trimmed mean", attack) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("attack", STRONG)
@pytest.mark.parametrize(("world", "f"), attacks.SETTINGS)
def test_the_plain_mean_fails(world, f, attack):
    assert losses(world, f, "mean", attack) >= FAILED


def one_of_four(rank, text, steps):
    """DDP over Gloo; the last rank sends its gradient times -10."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(DigitModel(WIDTH), bucket_cap_mb=0.01)
    task = attacks.task()
    if rank == 3:
        for parameter in ddp.parameters():
            parameter.register_hook(lambda gradient: -10 * gradient)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    with gl.attach(ddp, text, timeout=30, nonfinite="propagate") as attachment:  # the mean must fail
        for step in range(steps):
            optimizer.zero_grad()
            ddp(*task.batch(64, 0, rank, step)).backward()
            optimizer.step()
        metrics = attachment.metrics()
    assert replicas_equal(list(ddp.parameters())) or text == "Mean()"  # which ends in NaN
    inputs, targets = task.held_out
    return 100 * float((ddp.module.layers(inputs).argmax(1) == targets).float().mean()), metrics


@pytest.mark.slow
def test_one_of_four_on_gloo():
    robust = f"WorkerMomentum(Combined(NNM(1, then=TrimmedMean(1))), beta={MOMENTUM})"
    found = run_ranks(one_of_four, 4, robust, 80, deadline=120)
    accuracy, metrics = found[0]
    assert accuracy > 85
    assert all(other == accuracy for other, _ in found)
    assert run_ranks(one_of_four, 4, "Mean()", 80, deadline=120)[0][0] < accuracy - FAILED
    far = [metrics[f"comm/rank{rank}_distance_norm"] for rank in range(4)]
    assert far[3] > 3 * max(far[:3])
    plain = metrics["comm/bytes_raw"] * 2 * 3 / 4
    inner_products = metrics["comm/collectives"] / 3 * 2 * 3 / 4 * 8 * 4 * 5
    assert metrics["comm/bytes_wire"] <= 1.02 * plain + inner_products
