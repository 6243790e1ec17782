"""torch's PowerSGD under its own names: the same arguments, and where torch's hook can run the same numbers.

What torch 2.13 does on Gloo is told in comments; the assertions are about ours.
"""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

from ..support.powersgd_hooks import HOOKS, SMALL, finite, gradient, hooked, soon, stepping
from ..support.training import build, data, replicas_equal


@pytest.mark.parametrize("name", ["PowerSGDState", "powerSGD_hook", "batched_powerSGD_hook"])
def test_signatures_are_torchs(name):
    ours, torchs = (inspect.signature(getattr(module, name)) for module in (compat, theirs))
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in torchs.parameters.values()
    ]


@pytest.mark.parametrize("options", [{"start_powerSGD_iter": 0}, {"start_powerSGD_iter": 1},
                                     {"start_powerSGD_iter": 1, "use_error_feedback": False},
                                     {"start_powerSGD_iter": 1, "warm_start": False}], ids=str)  # fmt: skip
def test_what_torch_refuses_is_refused(options):
    for state in (theirs.PowerSGDState, compat.PowerSGDState):
        with pytest.raises(ValueError, match="start_powerSGD_iter"):
            state(None, **options)
    with pytest.raises(gl.InvalidValue, match=r"use 2 or more, .* or gradlane.attach"):
        compat.PowerSGDState(None, **options)


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("matrix_approximation_rank", 0, "whole number from 1 up"),
        ("matrix_approximation_rank", -1, "whole number from 1 up"),
        ("matrix_approximation_rank", 1.5, "whole number from 1 up"),
        ("start_powerSGD_iter", -3, "whole number from 0 up"),
        ("min_compression_rate", -1, "number from 0 up"),
        ("min_compression_rate", math.nan, "number from 0 up"),
        ("orthogonalization_epsilon", -1e-8, "number from 0 up"),
        ("random_seed", -1, "whole number from 0 up"),
        ("compression_stats_logging_frequency", "often", "whole number"),
    ],
)
def test_values_without_a_meaning_are_refused(option, value, limit):
    # torch takes a rank of 0 or -1 and a negative rate, and fails or sends nonsense later
    with pytest.raises(
        gl.InvalidValue, match=f"{option}={value}.*; use a {limit}".replace("=often", "='often'")
    ):
        compat.PowerSGDState(None, **{option: value})


def test_arguments_are_attributes():
    values = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 7, "min_compression_rate": 1.5,
              "use_error_feedback": False, "warm_start": False, "orthogonalization_epsilon": 1e-8,
              "batch_tensors_with_same_shape": True}  # fmt: skip
    for kind in (theirs.PowerSGDState, compat.PowerSGDState):
        state = kind(None, **values, compression_stats_logging_frequency=0)
        assert {name: getattr(state, name) for name in values} == values
        assert state.compression_stats_logging_frequency == 1
        assert (state.iter, state.error_dict, state.p_memory_dict, state.q_memory_dict) == (0, {}, {}, {})
        assert state.compression_stats() == (0, 0, 0)
    assert compat.PowerSGDState(None, random_seed=5).random_seed == 5


def as_documented(rank):
    """The example of torch's documentation, with the import replaced."""
    ddp_model = DistributedDataParallel(build(), **SMALL)
    state = compat.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
    )
    ddp_model.register_comm_hook(state, compat.powerSGD_hook)
    return stepping(ddp_model, rank, range(6)), state.iter, finite(state)


def test_torchs_own_example():
    # torch, with two or more buckets: hangs, or aborts the process
    assert run_ranks(as_documented, 2) == [(True, 6, True)] * 2


def all_hooks(rank, world):
    """Dense iterations first, then compressed ones; whether anything was lost, and how much was sent."""
    found = {}
    for name, hook in HOOKS.items():
        state = soon(matrix_approximation_rank=2)
        ddp = hooked(state, hook)
        dense = DistributedDataParallel(build(), **SMALL)
        lost = []
        for step in range(5):
            for model in (dense, ddp):
                model.zero_grad()
                model(data(rank, step)).backward()
            lost.append(float((gradient(ddp) - gradient(dense)).norm() / gradient(dense).norm()))
        equal = replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])
        wide = all(residual.dtype == torch.float32 for residual in state.error_dict.values())
        found[name] = (equal, lost, finite(state) and wide, state.compression_stats()[0])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_hook_with_many_buckets(world):
    # torch: powerSGD_hook hangs; batched_powerSGD_hook fails an assertion at its first compressed step
    for found in run_ranks(all_hooks, world, world):
        for name, (equal, lost, fine, rate) in found.items():
            narrow = 2**-10 if "fp16" in name else 2**-7 if "bf16" in name else 1e-6
            assert equal, name
            assert max(lost[:2]) <= narrow, name
            assert (min(lost[:2]) > 1e-6) == ("(" in name), f"{name}: narrow where it should not be, or wide"
            assert min(lost[2:]) > 0.01, name
            assert max(lost[2:]) < 2, name
            assert fine, name
            assert rate > 3, name


class Matrices(nn.Module):
    """Small enough for one bucket, of whole and of low rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 12)
        self.second = nn.Linear(12, 16)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x[:, :20]))).square().mean()


def recording(order):
    """torch's hook, and which parameters its only bucket held."""

    def hook(state, bucket):
        order[:] = bucket.parameters()
        return theirs.powerSGD_hook(state, bucket)

    return hook


def one_step_each(rank, options, steps):
    """Some steps of torch's hook on one bucket; then one of torch's and one of ours, from torch's memory."""
    order = []
    torchs_state = theirs.PowerSGDState(None, start_powerSGD_iter=2, **options)
    torchs = hooked(torchs_state, recording(order), build(Matrices), bucket_cap_mb=25)
    for step in range(steps):
        torchs.zero_grad()
        torchs(data(rank, step)).backward()
    names = {id(p): name for name, p in torchs.module.named_parameters()}
    state = compat.PowerSGDState(None, start_powerSGD_iter=2, **options)
    ours = hooked(state, compat.powerSGD_hook, build(Matrices), bucket_cap_mb=25)
    state.name_parameters(ours)
    before = torchs_state.compression_stats()
    state.load_state_dict({
        **state.state_dict(), "names_of_model": True, "iter": steps,
        "error": by_name(torchs_state.error_dict.get(0), order, names),
        "q": factors_by_name(torchs_state.q_memory_dict.get(0), order, names, options),
        "stats": {"before": before[1], "after": before[2], "next_report": 0},
    })  # fmt: skip
    for model in (torchs, ours):
        model.zero_grad()
        model(data(rank, steps)).backward()
    plain = DistributedDataParallel(build(Matrices))
    plain(data(rank, steps)).backward()
    stats = torchs_state.compression_stats(), state.compression_stats()
    return gradient(torchs), gradient(ours), gradient(plain), stats, (torchs_state.iter, state.iter)


def by_name(memory, order, names):
    if memory is None:
        return {}
    parts = memory.split([p.numel() for p in order])
    return {names[id(p)]: part.view(p.shape) for p, part in zip(order, parts, strict=True)}


def factors_by_name(memory, order, names, options):
    """torch keeps Q as columns x rank, one after the other, those of one shape together."""
    if memory is None:
        return {}
    found, start = {}, 0
    for p in order:
        if p.dim() < 2:
            continue
        rank = min(*p.shape, options["matrix_approximation_rank"])
        if not sum(p.shape) * rank * options["min_compression_rate"] < p.numel():
            continue
        numel = p.shape[1] * rank
        rows = memory[start : start + numel].view(p.shape[1], rank).T.contiguous()
        found[names[id(p)]] = torch.linalg.qr(rows.T).Q.T.contiguous()
        start += numel
    assert start == memory.numel()
    return found


@pytest.mark.parametrize("rank", [1, 2])
def test_a_step_from_torchs_memory_gives_torchs_answer(rank):
    # One bucket is what torch's hook can do on Gloo.
    options = {"matrix_approximation_rank": rank, "min_compression_rate": 1}
    for torchs, ours, plain, stats, steps in run_ranks(one_step_each, 2, options, 5):
        # Matrices only: torch adds an error of 0 to vectors, but for rounding.
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-7)
        assert (ours - plain).norm() > 0.01 * plain.norm()
        assert stats[0] == stats[1]
        assert stats[0][0] > 1
        assert steps == (6, 6)


def test_at_full_rank_both_are_the_mean():
    options = {"matrix_approximation_rank": 64, "min_compression_rate": 0.1, "use_error_feedback": False}
    for torchs, ours, plain, _, _ in run_ranks(one_step_each, 2, options, 2):
        torch.testing.assert_close(torchs, plain, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
