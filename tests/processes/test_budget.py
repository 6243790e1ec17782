"""Ranks under a budget in real processes: several buckets, which DDP rebuilds, and ranks without data."""

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal

SMALL = {"bucket_cap_mb": 0.004}  # about one layer a bucket
BUDGET, STEPS = 0.4, 10


def trained(rank):
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    strategy = gl.ErrorFeedback(gl.PowerSGD(budget=BUDGET, every=3))
    sent, chosen, equal = {}, [], []

    def heard(event):
        sent[event.step] = sent.get(event.step, 0) + event.payload_elements

    with gl.attach(ddp, strategy, observer=heard, timeout=20) as attachment:
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
            chosen.append(strategy.inner.ranks())
            equal.append(replicas_equal(ddp.parameters()))
        noted = attachment.metrics()["comm/step/ranks"]
    numel = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
    return sent, chosen, all(equal), numel, noted


def test_ranks_agree_and_the_budget_holds():
    first, second = run_ranks(trained, 2, deadline=60)
    assert first == second
    sent, chosen, equal, numel, noted = first
    assert equal
    assert len(sent) == STEPS
    assert all(sent[step] <= BUDGET * numel for step in range(1, STEPS))
    assert len(set(chosen[-1].values())) > 1  # layers differ
    assert noted == sum(chosen[-1].values())


def uneven(rank):
    """DDP.join: rank r has 4 + 4 r batches."""
    ddp = DistributedDataParallel(build(), **SMALL)
    strategy = gl.PowerSGD(budget=BUDGET, every=3)
    attachment = gl.attach(ddp, strategy, timeout=20)
    with ddp.join():
        for step in range(4 + 4 * rank):
            ddp(data(rank, step)).backward()
    attachment.close()
    return strategy.ranks()


def test_a_rank_that_joined_early_decides_as_the_others():
    first, second = run_ranks(uneven, 2, deadline=60)
    assert first
    assert first == second
