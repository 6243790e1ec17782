"""NaN and infinity in the gradient of one rank (R8): all skip the same steps, and memory is as before."""

import logging
import math
import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..laws.test_undo import equal, tensors
from ..support.grids import every
from ..support.training import build, data, replicas_equal
from .harness import drawn_again

SMALL = {"bucket_cap_mb": 0.004}
STEPS = 60
BAD = (math.nan, math.inf, -math.inf)
STRATEGIES = (
    "Mean()",
    "Cast(Mean(), float16)",
    "ErrorFeedback(Sharded(Int4(block=32)))",
    "ErrorFeedback(Gathered(TopK(0.1)))",
    "ErrorFeedback(PowerSGD(1, min_compression_rate=1))",
    "ErrorFeedback(AcpSGD(1, min_compression_rate=1))",
    "EF21(Gathered(TopK(0.2)))",
    "DGC(0.1, clip=1.0)",
)


class Injected:
    """Puts bad numbers into the gradients of this rank at some (step, rank, parameter), and counts them."""

    def __init__(self, model, rank, places):
        self.step, self.fired = 0, 0
        parameters = [p for p in model.parameters() if p.requires_grad]
        for step, who, which, value in places:
            if who == rank:
                self._watch(parameters[which % len(parameters)], step, value)

    def _watch(self, parameter, at, value):
        def spoil(grad):
            if self.step != at:
                return grad
            self.fired += 1
            spoiled = grad.clone()
            spoiled.view(-1)[grad.numel() // 2] = value
            return spoiled

        parameter.register_hook(spoil)


def train(rank, strategy, places, policy, without=()):
    """What became of sixty steps; those ``without`` are counted and not taken."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    injected = Injected(ddp.module, rank, places)
    skipped, caught, untouched, losses = [], [], True, []
    with gl.attach(ddp, strategy, timeout=30, nonfinite=policy) as attachment:
        for step in range(STEPS):
            injected.step = step
            if step in without:
                attachment._step.next += 1
                continue
            before = attachment.state_dict()["state"]
            weights = [p.detach().clone() for p in ddp.parameters()]
            optimizer.zero_grad()
            loss = ddp(data(rank, step % 4))
            try:
                loss.backward()
            except gl.NonFinite as error:
                caught.append((step, str(error)))
            if attachment.skipped:
                skipped.append(step)
                untouched &= step == 0 or equal(attachment.state_dict()["state"], before)
            else:
                losses.append(loss.item())
            optimizer.step()
            if attachment.skipped:
                untouched &= all(map(torch.equal, ddp.parameters(), weights))
        finite = all(tensor.isfinite().all() for tensor in tensors(attachment.state_dict()["state"]))
        return {
            "weights": [p.detach().clone() for p in ddp.parameters()],
            "skipped": skipped, "caught": caught, "untouched": untouched, "finite": bool(finite),
            "loss": sum(losses[-4:]), "fired": injected.fired, "equal": replicas_equal(ddp.parameters()),
            "counted": attachment.metrics()["comm/skipped"],
        }  # fmt: skip


def places_from(seed, count=20, world=2):
    chance = random.Random(seed)
    steps = chance.sample(range(1, STEPS), count)  # the first step is that of DDP's first buckets
    return [(s, chance.randrange(world), chance.randrange(100), chance.choice(BAD)) for s in sorted(steps)]


@pytest.mark.parametrize("strategy", every(3, STRATEGIES))
def test_all_skip_the_same_steps(strategy):
    """And it is as if these had never been, to the last bit."""
    places = places_from(seed := drawn_again(7), count=12)
    print("seed", seed)
    ranks = run_ranks(train, 2, strategy, places, "skip")
    clean = run_ranks(train, 2, strategy, [], "skip", [step for step, *_ in places])[0]
    assert sum(told["fired"] for told in ranks) == len(places)
    assert clean["skipped"] == []
    for rank, told in enumerate(ranks):
        assert told["skipped"] == [step for step, *_ in places]
        assert told["counted"] == len(places)
        assert told["untouched"]
        assert told["finite"]
        assert told["equal"]
        assert told["caught"] == []
        assert told["loss"] == clean["loss"] or rank
        assert all(map(torch.equal, told["weights"], clean["weights"]))


def train_each(rank, places, policy):
    return [train(rank, strategy, places, policy) for strategy in STRATEGIES]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
def test_twenty_random_places(policy, world):
    """With every strategy, one after the other."""
    places = places_from(seed := drawn_again(world), world=world)
    print("seed", seed)
    bad = [step for step, *_ in places]
    for ranks in zip(*run_ranks(train_each, world, places, policy, deadline=120), strict=True):
        assert sum(told["fired"] for told in ranks) == len(places)
        for told in ranks:
            assert told["finite"]
            if policy != "propagate":
                assert told["untouched"]
                assert told["equal"]
                assert told["skipped"] == bad
            if policy == "raise":
                assert [step for step, _ in told["caught"]] == bad
    print(
        f"{policy}, {world} ranks, {len(STRATEGIES)} strategies: {len(places)} of {len(places)} places each"
    )


def test_raise_names_parameter_step_and_way_out():
    for told in run_ranks(train, 2, "ErrorFeedback(Sharded(Int4(block=32)))", [(5, 1, 0, math.nan)], "raise"):
        ((step, message),) = told["caught"]
        assert step == 5
        assert told["untouched"]
        assert "step 5: the mean gradient of" in message
        assert "nonfinite='skip'" in message


def test_more_than_ten_in_a_row_raise():
    places = [(step, 0, 3, math.nan) for step in range(20, 40)]
    for told in run_ranks(train, 2, "Mean()", places, "skip"):
        assert [step for step, _ in told["caught"]] == list(range(30, 40))
        assert "10 skipped steps in a row" in told["caught"][0][1]


def test_propagate_is_what_ddp_does_and_memory_stays_finite():
    strategy = "ErrorFeedback(Sharded(Int4(block=32)))"
    for told in run_ranks(train, 2, strategy, [(5, 1, 0, math.nan)], "propagate"):
        assert told["skipped"] == []
        assert told["finite"]
        assert math.isnan(told["loss"])


def warned(rank):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)
    train(rank, "Mean()", [(5, 1, 0, math.nan), (6, 1, 0, math.nan)], "skip")
    return records


def test_the_rank_that_goes_on_with_it_is_named():
    quiet, bad = run_ranks(warned, 2)
    assert any("step 5 is skipped on all ranks: the mean gradient of" in line for line in quiet)
    assert not any("on rank" in line for line in quiet)
    assert any("step 6: on rank 1 the gradient of" in line for line in bad)


def unknown_policy(rank):
    with pytest.raises(gl.InvalidValue, match="nonfinite='ignore' is not known; use 'skip'"):
        gl.attach(DistributedDataParallel(build()), "Mean()", nonfinite="ignore")
    with pytest.raises(gl.RanksDisagree, match="differ in nonfinite: rank 0 has skip, rank 1 has raise"):
        gl.attach(DistributedDataParallel(build()), "Mean()", nonfinite=("skip", "raise")[rank], timeout=20)
    return True


def test_policies_are_checked_and_compared():
    assert run_ranks(unknown_policy, 2) == [True, True]


def local_steps_after_a_skip(rank):
    """Whether the skipped step, its repetition, and a step with local gradients have changed the weights."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    injected = Injected(ddp.module, rank, [(1, 1, 0, math.nan)])
    changed = []

    def step():
        before = [p.detach().clone() for p in ddp.parameters()]
        optimizer.step()
        changed.append(not all(map(torch.equal, ddp.parameters(), before)))

    with gl.attach(ddp, "Mean()", timeout=30) as attachment:
        ddp(data(rank, 0)).backward()
        step()
        injected.step = 1
        ddp(data(rank, 1)).backward()
        step()
        step()
        optimizer.zero_grad()
        injected.step = 2
        with ddp.no_sync():
            ddp(data(rank, 2)).backward()
        step()
        return changed, attachment.metrics()["comm/skipped"]


def test_only_the_gradients_of_a_skipped_step_are_withheld():
    assert run_ranks(local_steps_after_a_skip, 2) == [([True, False, False, True], 1)] * 2
