"""Rules over ranks on real processes: what they send, where buckets meet, who is named."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.grids import grid
from ..support.training import build, data, replicas_equal


def bytes_of(rank, text, megabytes):
    ddp = DistributedDataParallel(build(width=128), bucket_cap_mb=megabytes)
    kinds = []
    with gl.attach(ddp, text, timeout=20, observer=lambda event: kinds.append(event.kind)) as attachment:
        for step in range(3):
            ddp.zero_grad()
            ddp(data(rank, step, width=128)).backward()
            assert replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])
        return attachment.metrics(), kinds.count("all_reduce")


MIXED = "NNM(0, then=TrimmedMean(0))"


@pytest.mark.parametrize(
    ("world", "rule"),
    grid(
        [2, 4],
        ["Median()", "GeometricMedian()", MIXED],
        quick=[(2, "Median()"), (4, "GeometricMedian()"), (4, MIXED)],
    ),
)
def test_the_ledger_has_a_plain_all_reduce_and_the_inner_products(world, rule):
    for megabytes in (25, 0.1):
        metrics, small = run_ranks(bytes_of, world, f"Combined({rule})", megabytes)[0]
        factor = 2 * (world - 1) / world
        assert small == 3 if megabytes == 25 else small > 3
        plain = factor * metrics["comm/bytes_raw"]
        assert plain <= metrics["comm/bytes_wire"] <= 1.02 * plain + small * factor * 8 * world**2


def left_out(rank):
    logging.getLogger("gradlane").addHandler(handler := _Kept())
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    with gl.attach(ddp, gl.Combined(gl.Krum(0), watch=gl.Watch(patience=2)), timeout=20) as attachment:
        for step in range(5):
            ddp.zero_grad()
            wrong = torch.inf if step == 4 else 1000.0
            (ddp(data(rank, step)) * (wrong if rank == 3 else 1.0)).backward()
            assert replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])
            assert all(p.grad.isfinite().all() for p in ddp.parameters() if p.requires_grad)
        return handler.texts, attachment.metrics()


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_who_is_wrong_is_named_by_rank_0_and_by_itself():
    found = run_ranks(left_out, 4)
    assert found[1][0] == found[2][0] == []
    assert found[0][0] == found[3][0]
    assert found[0][0][0].startswith("rank 3 has been an outlier since step 0 ")
    assert found[0][0][1:] == ["rank 3 sent values that are not finite in step 4 and is left out"]
    assert found[1][1]["comm/rank3_excluded"] == 1
    assert found[1][1]["comm/step/rank3_excluded"] == 1
    weights = [found[1][1].get(f"comm/step/rank{rank}_weight", 0.0) for rank in range(4)]
    assert sorted(weights) == [0, 0, 0, 1]  # Krum hears one
    assert weights[3] == 0


def too_many(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    with gl.attach(ddp, "Combined(Krum(0))", timeout=20):
        with pytest.raises(gl.InvalidValue, match="ranks 0, 1 sent values that are not finite; 2 of 4 ranks"):
            (ddp(data(rank, 0)) * (torch.inf if rank < 2 else 1.0)).backward()
        ddp.zero_grad()
        ddp(data(rank, 1)).backward()
        return replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])


def test_too_few_that_are_left_is_an_error_on_all_ranks_and_the_next_step_runs():
    assert run_ranks(too_many, 4) == [True] * 4


def too_few(rank):
    told = []
    for strategy in (
        "Combined(Krum(1))",
        "After(9, Sharded(Raw(), TrimmedMean(1)))",
        "WeightedMean(1.0, max_share=0.1)",
    ):
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        for call in (gl.attach, gl.attach_without_ddp):
            with pytest.raises(gl.InvalidValue) as caught:
                call(ddp if call is gl.attach else nn.Linear(3, 1), strategy, timeout=20)
            told.append(str(caught.value))
        with gl.attach(ddp, "Mean()", timeout=20) as attachment:
            with pytest.raises(gl.InvalidValue) as caught:
                attachment.swap(strategy)
            told.append(str(caught.value))
            ddp(torch.ones(2, 3)).sum().backward()  # the old one is in force
    return told


def test_too_few_ranks_are_told_at_attach_and_swap():
    answers = run_ranks(too_few, 2)
    assert answers[0] == answers[1]
    assert [text.split(":")[0] for text in answers[0]] == ["attach", "reduce_gradients", "swap"] * 3
    assert all("Krum f=1 needs 5 ranks, and there are 2" in text for text in answers[0][:3])
    assert all("trim=1 leaves nothing of 2 ranks" in text for text in answers[0][3:6])
    assert all("max_share=0.1 is not possible with 2 ranks" in text for text in answers[0][6:])
