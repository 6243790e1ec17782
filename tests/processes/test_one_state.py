"""One state, one model: what a strategy keeps of a model never goes into another one by accident."""

import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

FEEDBACK = "ErrorFeedback(Gathered(TopK(0.1)))"


def critic(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))


def stepped(ddp, rank, steps=2):
    for step in range(steps):
        torch.manual_seed(100 * rank + step)
        ddp(torch.randn(4, 6)).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def refusal(call, *args, **kwargs):
    with pytest.raises(gl.GradlaneError) as caught:
        call(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value)


def twins(rank):
    """Two critics: one strategy object for both is refused; a stateless one, and one each, are not."""
    one, two, three = (DistributedDataParallel(critic(seed)) for seed in range(3))
    told = {}
    shared = gl.parse(FEEDBACK)
    first = gl.attach(one, shared, timeout=20)
    told["attach"] = refusal(gl.attach, two, shared, timeout=20)
    told["part of it"] = refusal(gl.attach, two, gl.After(3, then=shared), timeout=20)
    other = gl.ErrorFeedback(gl.Gathered(gl.Int8()))
    other.memory = shared.memory
    told["memory"] = refusal(gl.attach, two, other, timeout=20)
    plain = critic(7)
    stepped(plain, rank, 1)
    told["without DDP"] = refusal(gl.attach_without_ddp, plain, shared, timeout=20)
    second = gl.attach(two, copy.deepcopy(shared), timeout=20)  # nothing is in it yet
    told["swap"] = refusal(second.swap, shared)
    gl.attach(three, gl.Sharded(gl.Int8()), timeout=20)
    stateless = gl.Sharded(gl.Int8())
    first.swap(stateless)
    second.swap(stateless)
    tokens = gl.TokenCount()
    first.swap(gl.WeightedMean(tokens))
    told["count"] = refusal(second.swap, gl.WeightedMean(tokens))
    both = gl.parse(FEEDBACK)
    second.swap(gl.Route({"0.*": both, "1.*": both}))  # one attachment
    stepped(two, rank)
    return told


@pytest.mark.parametrize("world", [2, 3])
def test_a_strategy_that_is_at_work_is_refused_for_another_model(world):
    answers = run_ranks(twins, world)
    assert all(told == answers[0] for told in answers)
    for case, (kind, text) in answers[0].items():
        assert kind == "WrongState"
        whose = "WeightedMean.weight" if case == "count" else "ErrorFeedback.memory"
        assert f"{whose} is at work on another model already" in text
        assert "make a strategy for each model" in text


def one_rank_only(rank):
    """All ranks hear of what is wrong on one of them, and can go on."""
    one, two = (DistributedDataParallel(critic(seed)) for seed in range(2))
    shared = gl.parse(FEEDBACK)
    gl.attach(one, shared, timeout=20)
    strategy = shared if rank == 1 else gl.parse(FEEDBACK)
    told = refusal(gl.attach, two, strategy, timeout=20)
    gl.attach(two, FEEDBACK, timeout=20)
    stepped(two, rank)
    return told


def test_what_is_wrong_on_one_rank_is_told_on_all():
    answers = run_ranks(one_rank_only, 3)
    assert all(told == answers[0] for told in answers)
    assert answers[0][1].startswith("attach: rank 1: ErrorFeedback.memory is at work")


def again(rank, folder):
    """A sweep, a cell that runs twice: the second model must begin clean, or not at all."""
    strategy, told = gl.parse(FEEDBACK), {}
    model = critic()
    ddp = DistributedDataParallel(model)
    with gl.attach(ddp, strategy, timeout=20) as old:
        stepped(ddp, rank)
        old.save(folder)
        saved = old.state_dict()
    kept = strategy.state_dict()["memory"]
    fresh = DistributedDataParallel(critic())
    told["again"] = refusal(gl.attach, fresh, strategy, timeout=20)
    told["a copy"] = refusal(gl.attach, fresh, copy.deepcopy(strategy), timeout=20)
    told["without DDP"] = refusal(gl.attach_without_ddp, critic(), strategy, timeout=20)
    # The same model goes on with what it is residual, in another wrapper too.
    with gl.attach(DistributedDataParallel(nn.Sequential(*model)), strategy, timeout=20):
        assert torch.equal(strategy.state_dict()["memory"]["0.weight"], kept["0.weight"])
    # On purpose: by the new attachment, from a checkpoint, or into the strategy beforehand.
    with gl.attach(fresh, FEEDBACK, timeout=20) as new:
        new.load_state_dict(saved)
        assert new.step == 2
        stepped(fresh, rank, 1)
    with gl.attach(fresh, FEEDBACK, timeout=20) as new:
        new.load(folder)
        assert torch.equal(new.strategy.state_dict()["memory"]["0.weight"], kept["0.weight"])
        stepped(fresh, rank, 1)
    strategy.load_state_dict(saved["state"])
    ddp = DistributedDataParallel(critic())
    with gl.attach(ddp, strategy, timeout=20) as new:
        assert torch.equal(new.strategy.state_dict()["memory"]["0.weight"], kept["0.weight"])
        stepped(ddp, rank, 1)
    # What was never used, or is empty again, is anybody's.
    unused = gl.parse(FEEDBACK)
    for _ in range(2):
        gl.attach(DistributedDataParallel(critic()), unused, timeout=20).close()
    strategy.load_state_dict({})
    ddp = DistributedDataParallel(critic())
    with gl.attach(ddp, strategy, timeout=20):
        stepped(ddp, rank, 1)
    assert pickle.loads(pickle.dumps(strategy)).state_dict().keys() == {"memory"}
    return told


def test_a_strategy_used_again_is_refused_for_another_model(tmp_path):
    answers = run_ranks(again, 2, str(tmp_path / "saved"))
    assert answers[0] == answers[1]
    for kind, text in answers[0].values():
        assert kind == "WrongState"
        assert "ErrorFeedback.memory still has what the steps of another model left in it" in text
        assert "attachment.load_state_dict(old.state_dict())" in text


def spent(rank):
    """A budget is about the data: it goes on, whatever model, and nothing begins it anew."""
    private = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.0)
    counts, told = [], []
    for seed in range(2):
        ddp = DistributedDataParallel(critic(seed))
        with gl.attach(ddp, private, timeout=20) as attachment:
            stepped(ddp, rank)
            counts.append(sum(private.spent.runs().values()))
            told.append(refusal(gl.attach, DistributedDataParallel(critic(5)), private, timeout=20))
            attachment.swap(gl.Private(gl.Mean(), clip=2.0, noise_multiplier=1.0))
            stepped(ddp, rank, 1)
            counts.append(sum(attachment.strategy.spent.runs().values()))
            attachment.swap(private)
            counts.append(sum(private.spent.runs().values()))
    lowrank = gl.Private(gl.PowerSGD(1), clip=1.0, noise_multiplier=1.0)
    ddp = DistributedDataParallel(critic())
    with gl.attach(ddp, lowrank, timeout=20):
        stepped(ddp, rank)
    told.append(refusal(gl.attach, DistributedDataParallel(critic(5)), lowrank, timeout=20))
    return counts, told


def test_a_budget_is_never_begun_anew():
    for counts, told in run_ranks(spent, 2):
        assert counts == [2, 3, 3, 5, 6, 6]
        assert "Private.spent is at work on another model" in told[0][1]
        assert "PowerSGD.factors still has" in told[2][1]
        assert "with Private.spent of the old one, which counts what was spent" in told[2][1]


def swaps(rank):
    """The residual goes over to a strategy that can owe it, once; what cannot is told."""
    ddp = DistributedDataParallel(critic())
    lines, found = [], {}
    gl.log.log.warning = lambda text, *values: lines.append(text % values)
    with gl.attach(ddp, FEEDBACK, timeout=20) as attachment:
        stepped(ddp, rank)
        first = attachment.strategy
        residual = first.state_dict()["memory"]
        attachment.swap("After(1, ErrorFeedback(Sharded(Int4(block=32))))")
        now = attachment.strategy.then.state_dict()["memory"]
        found["moved"] = (
            all(torch.equal(now[name], residual[name]) for name in residual) and now.keys() == residual.keys()
        )
        found["gone"] = first.state_dict() == {} and lines == []
        attachment.swap(first)
        found["back"] = torch.equal(first.state_dict()["memory"]["0.weight"], residual["0.weight"])
        attachment.swap("ErrorFeedback(Gathered(TopK(0.1)), dtype=bfloat16)")
        narrow = attachment.strategy.state_dict()["memory"]["0.weight"]
        found["narrow"] = narrow.dtype == torch.bfloat16 and torch.equal(
            narrow, residual["0.weight"].bfloat16()
        )
        stepped(ddp, rank, 1)
        found["silent"] = lines == []
        attachment.swap("Mean()")
    return found, lines


def test_the_residual_goes_over_in_a_swap():
    for found, lines in run_ranks(swaps, 3):
        assert found == dict.fromkeys(found, True)
        assert lines == ["swap: dropped ErrorFeedback.memory: the new strategy has no state for it"]


def hooked(rank):
    """A PowerSGDState is for one model, as its docstring says."""
    state = compat.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    one, two = critic(0), critic(1)
    first, second = DistributedDataParallel(one), DistributedDataParallel(two)
    for ddp in (first, second):
        ddp.register_comm_hook(state, compat.powerSGD_hook)
    stepped(first, rank, 4)
    told = refusal_of_hook(stepped, second, rank)
    rebuilt = DistributedDataParallel(one)  # another wrapper of the same parameters
    rebuilt.register_comm_hook(state, compat.powerSGD_hook)
    stepped(rebuilt, rank, 2)
    return told


def refusal_of_hook(call, *args):
    with pytest.raises(RuntimeError) as caught:
        call(*args)
    return str(caught.value)


def test_a_state_of_a_compat_hook_is_for_one_model():
    for told in run_ranks(hooked, 2):
        assert "make a PowerSGDState for each DDP model" in told


@dataclass
class Momentum(gl.Strategy):
    """What everybody writes first."""

    beta: float = 0.9
    momentum: object = None

    async def reduce(self, bucket):
        if self.momentum is None:
            self.momentum = torch.zeros_like(bucket.flat)
        self.momentum.mul_(self.beta).add_(bucket.flat)
        return gl.Reduced(await gl.all_reduce(self.momentum.clone()))


@dataclass
class Hidden(gl.Strategy):
    beta: float = 0.9
    constants: dict = field(default_factory=dict)

    def __post_init__(self):
        self._memory = gl.Memory()

    async def reduce(self, bucket):
        return gl.Reduced(await gl.all_reduce(bucket.flat))


def plain_attributes(rank, folder):
    ddp = DistributedDataParallel(critic())
    told, lines = {}, []
    gl.log.log.warning = lambda text, *values: lines.append(text % values)
    told["at attach"] = refusal(gl.attach, ddp, Momentum(momentum=torch.zeros(1000)), timeout=20)
    told["in a dict"] = refusal(
        gl.attach, ddp, gl.Cast(Hidden(constants={"a": [torch.ones(3)]}), torch.float16), timeout=20
    )
    told["not saved"] = refusal(gl.attach, ddp, Hidden(), timeout=20)
    with gl.attach(ddp, Momentum(), timeout=20) as attachment:
        stepped(ddp, rank, 1)
        stepped(ddp, rank, 2)
        told["state_dict"] = refusal(attachment.state_dict)
        told["save"] = refusal(attachment.save, folder)
    return told, lines


def test_a_tensor_in_a_plain_attribute_is_told(tmp_path):
    for told, lines in run_ranks(plain_attributes, 2, str(tmp_path / "saved")):
        says = "Momentum.momentum holds a tensor of float32[1000], and a plain attribute is an option"
        assert says in told["at attach"][1]
        assert "gradlane.Memory" in told["at attach"][1]
        assert "Hidden.constants holds a tensor of float32[3]" in told["in a dict"][1]
        assert "Hidden._memory is a Memory that nobody saves" in told["not saved"][1]
        assert len(lines) == 1  # when the second step begins, and no more
        assert "Momentum.momentum holds a tensor of float32[49]" in lines[0]
        assert "Momentum.momentum holds" in told["state_dict"][1]
        assert "Momentum.momentum holds" in told["save"][1]
        assert told["save"][0] == "WrongState"
