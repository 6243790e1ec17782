"""torch's hooks under their own names: what torch promises, and what it gets wrong."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as theirs
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.compat.wrappers import translations
from gradlane.local import run_ranks

from ..support.training import build, data, flat, replicas_equal, same, train

SMALL = {"bucket_cap_mb": 0.004}


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook",
                                  "fp16_compress_wrapper", "bf16_compress_wrapper"])  # fmt: skip
def test_signatures_are_torchs(name):
    def parameters(module):
        signature = inspect.signature(getattr(module, name))
        return [(p.name, p.default, p.kind) for p in signature.parameters.values()]

    assert parameters(compat) == parameters(theirs)


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_signatures_of_the_quantization_hooks_are_torchs(name):
    ours, torchs = (inspect.signature(getattr(m, name)) for m in (compat, quantization_hooks))
    assert list(ours.parameters) == list(torchs.parameters)
    assert [p.default for p in ours.parameters.values()] == [p.default for p in torchs.parameters.values()]


def test_noop_has_torchs_signature():
    assert list(inspect.signature(compat.noop_hook).parameters) == ["_", "bucket"]
    assert list(inspect.signature(debugging_hooks.noop_hook).parameters) == ["_", "bucket"]


def gradients(rank, state, hook, scale=1.0):
    ddp = DistributedDataParallel(build(), **SMALL)
    ddp.register_comm_hook(state, hook)
    for step in range(3):  # past the rebuilding of buckets
        ddp.zero_grad()
        (ddp(data(rank, step)) * scale).backward()
    return flat([p.grad for p in ddp.parameters() if p.requires_grad])


def user_hook(state, bucket):
    """As torch's documentation shows it: divide, all-reduce, a future."""
    assert state is None
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda fut: fut.value()[0])


def every_hook(rank):
    plain = train(rank, None, steps=3, lr=0.0, **SMALL)[0][-1]
    expected = flat(plain)
    found = {}
    for state in (None, dist.group.WORLD):
        for name, hook in {
            "allreduce": compat.allreduce_hook,
            "fp16": compat.fp16_compress_hook,
            "bf16": compat.bf16_compress_hook,
            "fp16(allreduce)": compat.fp16_compress_wrapper(compat.allreduce_hook),
            "bf16(allreduce)": compat.bf16_compress_wrapper(compat.allreduce_hook),
            "bf16(fp16(allreduce))": compat.bf16_compress_wrapper(
                compat.fp16_compress_wrapper(compat.allreduce_hook)
            ),
            "8 bits per tensor": compat.quantization_pertensor_hook,
            "8 bits per channel": compat.quantization_perchannel_hook,
        }.items():
            got = gradients(rank, state, hook)
            found[name, state is None] = (got - expected).abs().max().item()
    for name, hook in {
        "fp16(user)": compat.fp16_compress_wrapper(user_hook),
        "bf16(user)": compat.bf16_compress_wrapper(user_hook),
        "fp16(torch's allreduce)": compat.fp16_compress_wrapper(theirs.allreduce_hook),
        "bf16(torch's allreduce)": compat.bf16_compress_wrapper(theirs.allreduce_hook),
    }.items():
        found[name, True] = (gradients(rank, None, hook) - expected).abs().max().item()
    return found, expected.abs().max().item()


@pytest.mark.parametrize("world", [2, 3])
def test_every_hook_on_gloo(world):
    for found, largest in run_ranks(every_hook, world, deadline=90):
        for (name, default_group), worst in found.items():
            exact = name == "allreduce"
            limit = 1e-6 if exact else largest * 2 ** (-6 if "8" in name else -7 if "bf16" in name else -10)
            assert worst <= limit, (name, default_group, worst)
            assert exact or worst > 0 or world > 2, f"{name} did not narrow anything"


def noop_then_a_mean(rank):
    """torch's own test: noop and a manual all-reduce equal no hook."""
    expected = flat(train(rank, None, steps=3, lr=0.0, **SMALL)[0][-1])
    local = gradients(rank, None, compat.noop_hook)
    dist.all_reduce(local)
    return torch.allclose(local / dist.get_world_size(), expected, rtol=1e-5, atol=1e-8)


def test_noop_and_a_manual_mean_equal_no_hook():
    assert run_ranks(noop_then_a_mean, 2) == [True, True]


def extremes(rank):
    """1e5 and 0 make inf in torch's fp16 hook, although the mean is representable."""

    class Scalar(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (self.weight * x).sum()

    answers = []
    for hook in (theirs.fp16_compress_hook, compat.fp16_compress_hook):
        ddp = DistributedDataParallel(Scalar())
        ddp.register_comm_hook(None, hook)
        ddp(torch.full((3,), 1e5 if rank == 0 else 0.0)).backward()
        answers.append(ddp.module.weight.grad[0].item())
    return answers


def test_fp16_divides_first():
    for torchs, ours in run_ranks(extremes, 2):
        assert torchs == float("inf")
        assert ours == pytest.approx(5e4, rel=1e-3)


def different_hooks(rank):
    """torch trains on garbage, silently."""
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(None, compat.fp16_compress_hook if rank else compat.bf16_compress_hook)
    with pytest.raises(
        gl.RanksDisagree, match=r"the ranks differ in hook: rank 0 has .*bfloat16.*, rank 1 has"
    ):
        ddp(data(rank, 0)).backward()
    return True


def test_ranks_with_different_hooks_are_refused():
    assert run_ranks(different_hooks, 2) == [True, True]


def wrong_state(rank):
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook("group", compat.allreduce_hook)
    with pytest.raises(gl.WrongType, match="state of this hook is a process group or None, got str"):
        ddp(data(rank, 0)).backward()
    with pytest.raises(gl.WrongType, match="the wrapper takes a hook, got int"):
        compat.fp16_compress_wrapper(3)
    return True


def test_wrong_state_is_named():
    assert run_ranks(wrong_state, 2) == [True, True]


def on_a_subgroup(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    plain = train(rank, None, group=group, **SMALL)
    return same(plain, train(rank, "compat allreduce", group=group, **SMALL))


def test_a_group_as_state_is_used():
    assert run_ranks(on_a_subgroup, 4) == [True] * 4


def two_models(rank, wrapping):
    """Two models of one shape, one hook and one backward: their messages must not share a buffer."""
    expected = [
        flat(train(rank, "compat bf16", steps=1, make=functools.partial(build, seed=s), **wrapping)[0][0])
        for s in (1, 2)
    ]
    models = [DistributedDataParallel(build(seed=seed), **wrapping) for seed in (1, 2)]
    for model in models:
        model.register_comm_hook(None, compat.bf16_compress_hook)
    for _ in range(3):
        for model in models:
            model.zero_grad()
        (models[0](data(rank, 0)) + models[1](data(rank, 0))).backward()
    found = [flat([p.grad for p in model.parameters() if p.requires_grad]) for model in models]
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("wrapping", [{}, SMALL], ids=["one bucket", "buckets that come in turns"])
def test_two_models_with_one_hook(wrapping):
    assert run_ranks(two_models, 2, wrapping) == [[True, True]] * 2


def many_steps(rank, how):
    _, weights = train(rank, how, steps=30, delays=True, **SMALL)
    return replicas_equal(weights)


@pytest.mark.parametrize("how", ["compat fp16", "compat bf16(allreduce)"])
def test_replicas_stay_equal(how):
    assert run_ranks(many_steps, 3, how) == [True] * 3


def test_a_wrapped_hook_that_is_dropped_is_forgotten():
    before = len(translations)
    kept = compat.fp16_compress_wrapper(compat.allreduce_hook)
    for _ in range(5):
        compat.bf16_compress_wrapper(kept)
    assert len(translations) == before + 1


def test_any_callable_can_be_wrapped():
    class Unhashable:
        __hash__ = None

        def __call__(self, state, bucket):
            raise AssertionError

    assert callable(compat.fp16_compress_wrapper(Unhashable()))
