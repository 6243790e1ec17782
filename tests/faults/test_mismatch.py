"""R6: ranks that differ in anything that matters are refused at attach, on all of them, by name."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks
from gradlane.session import opening

from .harness import drawing

WORLD = 3

OPTIONS = {
    "another strategy": ("Mean()", "Noop()"),
    "wrapped or not": ("Mean()", "Cast(Mean(), bfloat16)"),
    "wire dtype": ("Cast(Mean(), bfloat16)", "Cast(Mean(), float16)"),
    "exchange": ("Sharded(Int8())", "Gathered(Int8())"),
    "bits": ("Sharded(Int8())", "Sharded(Int4())"),
    "block": ("Sharded(Int8(block=256))", "Sharded(Int8(block=128))"),
    "rounding": ("Sharded(Int4())", "Sharded(Int4(rounding='stochastic'))"),
    "rotation": ("Sharded(Int4())", "Sharded(Int4(rotate=True))"),
    "format": ("Sharded(Fp8())", "Sharded(Fp8(format='e5m2'))"),
    "ratio": ("Gathered(TopK(0.1))", "Gathered(TopK(0.2))"),
    "value dtype": ("Gathered(TopK(0.1))", "Gathered(TopK(0.1, value='bfloat16'))"),
    "run": ("Summed(RandomK(0.1, run=4))", "Summed(RandomK(0.1, run=8))"),
    "feedback": ("Sharded(Int4())", "ErrorFeedback(Sharded(Int4()))"),
    "kind of feedback": ("ErrorFeedback(Sharded(Int4()))", "EF21(Sharded(Int4()))"),
    "memory dtype": ("ErrorFeedback(Sharded(Int4()))", "ErrorFeedback(Sharded(Int4()), bfloat16)"),
    "rank": ("PowerSGD(2)", "PowerSGD(4)"),
    "seed": ("PowerSGD(2, seed=1)", "PowerSGD(2, seed=2)"),
    "seed of the other": ("AcpSGD(2, seed=1)", "AcpSGD(2, seed=2)"),
    "iterations": ("PowerSGD(2)", "PowerSGD(2, iterations=2)"),
    "momentum": ("DGC(0.01)", "DGC(0.01, momentum=0.8)"),
    "schedule": ("After(10, Sharded(Int8()))", "After(20, Sharded(Int8()))"),
    "rule": ("Combined(Median())", "Combined(GeometricMedian())"),
    "share": ("WeightedMean(1.0)", "WeightedMean(1.0, max_share=0.5)"),
    "clip": (
        "Private(Mean(), clip=1.0, noise_multiplier=1.0)",
        "Private(Mean(), clip=2.0, noise_multiplier=1.0)",
    ),
}


def frozen(ddp):
    ddp.module[0].bias.requires_grad_(False)


def other_shape(ddp):
    ddp.module[0].weight = nn.Parameter(torch.zeros(8, 5))


def other_dtype(ddp):
    ddp.module[0].weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))


def other_name(ddp):
    layers = ddp.module._modules
    layers["head"] = layers.pop("1")


def one_more(ddp):
    ddp.module.scale = nn.Parameter(torch.ones(()))


def one_less(ddp):
    ddp.module[1].bias = None


def other_order(ddp):
    layers = ddp.module._modules
    layers["0"] = layers.pop("0")


MODELS = {
    change.__name__: change
    for change in (frozen, other_shape, other_dtype, other_name, one_more, one_less, other_order)
}
WRAPPINGS = {
    "bucket_cap_mb": ({"bucket_cap_mb": 25}, {"bucket_cap_mb": 1}),
    "find_unused_parameters": ({}, {"find_unused_parameters": True}),
    "static_graph": ({}, {"static_graph": True}),
}


def wrapped(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), **options)


def refused(ddp, strategy, **options):
    """The error's kind and message, how long it took; and the ranks are still fit for a good attach."""
    start = time.monotonic()
    try:
        gl.attach(ddp, strategy, timeout=20, **options).close()
    except gl.GradlaneError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "accepted", "", time.monotonic() - start


def every_option(rank, odd):
    ddp = wrapped()
    return {name: refused(ddp, pair[rank == odd]) for name, pair in OPTIONS.items()}


def every_model(rank, odd):
    found = {}
    for name, change in MODELS.items():
        ddp = wrapped()
        if rank == odd:
            change(ddp)  # DDP's own comparison, of shapes alone, is over
        found[name] = refused(ddp, "Mean()")
    return found


def every_wrapping(rank, odd):
    return {name: refused(wrapped(**pair[rank == odd]), "Mean()") for name, pair in WRAPPINGS.items()}


def the_rest(rank, odd):
    ddp = wrapped()
    found = {"ranks_per_node": refused(ddp, "Mean()", ranks_per_node=3 if rank == odd else 1)}
    if rank == odd:
        opening.__version__ = "0.0.0"
    found["version"] = refused(ddp, "Mean()")
    return found


def then_a_good_one(rank, cases, odd):
    """After all refusals the ranks are still good for an attach and a step."""
    found = cases(rank, odd)
    ddp = wrapped()
    opening.__version__ = gl.__version__
    with gl.attach(ddp, "Sharded(Int8())", timeout=20):
        ddp(torch.ones(2, 4)).sum().backward()
    return found


FIELDS = {
    **dict.fromkeys(OPTIONS, "strategy"),
    **dict.fromkeys(MODELS, "parameters"),
    **dict.fromkeys(WRAPPINGS, "wrapping"),
    **{name: name for name in ("ranks_per_node", "version")},
}


@pytest.mark.parametrize("cases", [every_option, every_model, every_wrapping, the_rest])
def test_every_mismatch_is_refused_on_all_ranks(cases):
    odd = drawing(f"the odd one of {cases.__name__}").randrange(WORLD)
    outcomes = run_ranks(then_a_good_one, WORLD, cases, odd, deadline=60)
    for name in outcomes[0]:
        for rank, outcome in enumerate(outcomes):
            kind, message, seconds = outcome[name]
            assert kind == "RanksDisagree", f"{name} on rank {rank}: {kind} {message}"
            assert f"the ranks differ in {FIELDS[name]}: " in message
            assert seconds < 5


def test_there_are_thirty_of_them():
    assert len(FIELDS) >= 30


def the_same_everywhere(rank):
    ddp = wrapped()
    return {pair[0]: refused(ddp, pair[0])[0] for pair in OPTIONS.values()}


def test_what_is_the_same_is_accepted():
    """So none of the refusals above was for another reason."""
    for outcome in run_ranks(the_same_everywhere, 2):
        assert set(outcome.values()) == {"accepted"}


def late_to_attach(rank):
    ddp = wrapped()
    if rank == 1:
        return "", None
    with pytest.raises(gl.PeerLost, match=r"rank 1 did not take part within 1\.5 s") as caught:
        gl.attach(ddp, "Mean()", timeout=1.5)
    return str(caught.value), caught.value.rank


def test_a_rank_that_does_not_attach_is_named():
    assert [rank for _, rank in run_ranks(late_to_attach, 3)] == [1, None, 1]
