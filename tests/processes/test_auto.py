"""``Auto`` on real ranks: it begins without a hook, decides alike, loses nothing, and can be repeated."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import RankFailed, run_ranks
from gradlane.session import choosing
from gradlane.torch_internals import registered_hook

from ..support.training import SparseLookup, build, data, flat, replicas_equal

OFF, INT8, INT4 = "Mean()", "Sharded(Int8(block=32))", "ErrorFeedback(Sharded(Int4(block=32)))"
AMONG = [INT8, INT4]


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    """What the tests here see of the link is scripted, or not asked for."""
    monkeypatch.setattr("gradlane.plan.measure_curves.SIZES", (24, 4096, 1 << 18))
    monkeypatch.setattr("gradlane.plan.measure_curves.LARGE", 1 << 18)


class Clock:
    """Time as a scripted link has it: a step takes what its strategy takes there."""

    def __init__(self, auto, seconds):
        self.auto, self.seconds, self.now = auto, seconds, 0.0

    def __call__(self):
        self.now += self.seconds(self.auto.course.now)
        return self.now


def scripted(auto, seconds, forecasts=None):
    """Let the tuner see these times, and these forecasts, instead of those of this machine."""
    auto.use_clock(Clock(auto, seconds))
    if forecasts is not None:
        choosing.Outlook = lambda *figures: lambda strategy, taken: forecasts


def trained(rank, auto, steps, attach=gl.attach, **options):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = attach(ddp, auto, **options)
    hooks = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        hooks.append(registered_hook(ddp) is not None)
        optimizer.step()
    return ddp, attachment, hooks


def plain(rank, steps):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    return flat(ddp.parameters())


def stay_off(rank):
    ddp, attachment, hooks = trained(rank, gl.Auto("exact"), 30)
    figures = attachment.metrics()
    return torch.equal(flat(ddp.parameters()), plain(rank, 30)), any(hooks), attachment.step, figures


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_where_nothing_can_pay_it_is_plain_ddp(world):
    for equal, hooked, step, figures in run_ranks(stay_off, world):
        assert equal
        assert not hooked
        assert step == 30
        assert figures["comm/steps"] == 30
        assert figures["comm/bytes_raw"] == figures["comm/step/bytes_raw"] * 30


def adopt(rank, seconds, steps):
    auto = gl.Auto(among=AMONG)
    scripted(auto, lambda now: seconds[now], seconds)
    ddp, attachment, hooks = trained(rank, auto, steps)
    return attachment.decisions(), hooks, replicas_equal(ddp.parameters()), flat(ddp.parameters())


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_what_pays_is_adopted_by_all_ranks_in_the_same_step(world):
    """Also with a residual: int4 is tried and rejected, so that its residual must be sent."""
    told = {OFF: 1.0, INT8: 0.5, INT4: 0.4}
    outcomes = run_ranks(adopt, world, told, 80)
    decisions, hooks, _, weights = outcomes[0]
    assert all(found[0] == decisions and found[2] and torch.equal(found[3], weights) for found in outcomes)
    assert decisions[-1].strategy == INT4
    assert "replaces Mean()" in decisions[-1].why
    begun = next(decision.step for decision in decisions if decision.strategy != OFF)
    assert not any(hooks[: begun - 1])
    assert all(hooks[begun:])


def follow(rank, decisions, steps):
    ddp, attachment, _ = trained(rank, gl.Auto(among=AMONG, replay=decisions), steps)
    return flat(ddp.parameters()), [decision[:2] for decision in attachment.decisions()]


def test_a_run_can_be_repeated_from_its_decisions():
    told = {OFF: 1.0, INT8: 0.6, INT4: 0.5}
    decisions, _, _, weights = run_ranks(adopt, 3, told, 70)[0]
    again, followed = run_ranks(follow, 3, decisions, 70)[0]
    assert followed == [decision[:2] for decision in decisions if decision.strategy != OFF or decision.step]
    assert torch.equal(again, weights)


def own_loop(rank, seconds, steps):
    model = build()
    auto = gl.Auto(among=AMONG)
    scripted(auto, lambda now: seconds[now])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = gl.attach_without_ddp(model, auto)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(rank, step)).backward()
        gl.reduce_gradients(model)
        optimizer.step()
    return attachment.decisions(), flat(p for p in model.parameters() if p.requires_grad)


def test_in_a_loop_without_ddp_it_tries_without_forecasts():
    outcomes = run_ranks(own_loop, 3, {OFF: 1.0, INT8: 0.5, INT4: 1.02}, 120)
    decisions, weights = outcomes[0]
    assert all(found[0] == decisions and torch.equal(found[1], weights) for found in outcomes)
    assert decisions[-1].strategy == INT8
    tried = {decision.strategy for decision in decisions}
    assert tried == {OFF, INT8, INT4}


@dataclass
class Raises(gl.Strategy):
    """As a strategy that is tried and is broken on one rank."""

    async def reduce(self, bucket):
        if bucket.rank == 1 and bucket.index == 1:
            raise ValueError("on purpose")
        return gl.Reduced(await gl.all_reduce(bucket.flat))


def broken(rank):
    auto = gl.Auto(among=[Raises()])
    scripted(auto, lambda now: 1.0 if now == OFF else 0.5, {OFF: 1.0, "Raises()": 0.5})
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    caught = []
    with gl.attach(ddp, auto, timeout=20) as attachment:
        for step in range(40):
            optimizer.zero_grad()
            try:
                ddp(data(rank, step)).backward()
            except (ValueError, gl.PeerFailed) as error:
                caught.append((step, type(error).__name__))
                if len(caught) == 3:
                    attachment.swap("Mean()")
                continue
            optimizer.step()
    return caught, replicas_equal(ddp.parameters())


def test_a_candidate_that_raises_is_an_error_on_all_ranks_until_it_is_swapped():
    (first, equal), (second, also) = run_ranks(broken, 2)
    assert equal
    assert also
    assert [step for step, _ in first] == [step for step, _ in second]
    assert [kind for _, kind in first] == ["PeerFailed"] * 3
    assert [kind for _, kind in second] == ["ValueError"] * 3


def saved(rank, folder, told, steps):
    auto = gl.Auto(among=AMONG)
    scripted(auto, lambda now: told[now], told)
    ddp, attachment, _ = trained(rank, auto, steps)
    attachment.save(folder)
    torch.save(ddp.module.state_dict(), f"{folder}/model{rank}")
    return attachment.decisions()


def resumed(rank, folder, told):
    auto = gl.Auto(among=AMONG)
    scripted(auto, lambda now: told[now])
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    ddp.module.load_state_dict(torch.load(f"{folder}/model0"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = gl.attach(ddp, auto)
    attachment.load(folder)
    before = auto.feedback.memory.state_dict()
    for step in range(40):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    residual = sum(float(r.abs().sum()) for r in auto.feedback.memory.state_dict().values())
    return attachment.decisions(), bool(before), residual, replicas_equal(ddp.parameters())


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_keeps_decisions_and_residual_with_other_ranks_too(world, tmp_path):
    """The machine of the resume is another one: there the plain mean is faster, so the residual is sent."""
    decisions = run_ranks(saved, 2, tmp_path, {OFF: 1.0, INT8: 2.0, INT4: 0.4}, 60)[0]
    assert decisions[-1].strategy == INT4
    outcomes = run_ranks(resumed, world, tmp_path, {OFF: 0.1, INT8: 2.0, INT4: 1.0})
    assert any(had_residual for _, had_residual, _, _ in outcomes)
    for found, _, residual, equal in outcomes:
        assert found[: len(decisions)] == decisions
        assert found[-1].strategy == OFF
        assert residual == 0
        assert equal


def with_nan(rank, told, at):
    auto = gl.Auto(among=[INT4])
    scripted(auto, lambda now: told[now], told)
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    skipped = []
    attachment = gl.attach(ddp, auto)
    for step in range(70):
        optimizer.zero_grad()
        batch = data(rank, step)
        if step in at and rank == 0:
            batch[0, 0] = torch.nan
        ddp(batch).backward()
        if attachment.skipped:
            skipped.append(step)
        optimizer.step()
    return (
        skipped,
        attachment.decisions(),
        replicas_equal(ddp.parameters()),
        bool(flat(ddp.parameters()).isfinite().all()),
    )


def test_steps_that_a_strategy_reduces_are_skipped_where_they_are_not_finite():
    """Every step from the first trial on may be one of them, so the trial itself must bear it."""
    told = {OFF: 1.0, INT4: 0.5}
    clean = run_ranks(with_nan, 2, told, [])[0][1]
    on = [decision.step for decision in clean if decision.strategy == INT4]
    at = [on[0], on[0] + 2, on[-1] + 3]
    for skipped, decisions, equal, finite in run_ranks(with_nan, 2, told, at):
        assert skipped == at
        assert decisions[-1].strategy == INT4
        assert equal
        assert finite


def swapped(rank):
    ddp, attachment, _ = trained(rank, gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), 5)
    auto = gl.Auto(among=AMONG)
    scripted(auto, lambda now: 1.0)
    attachment.swap(auto)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(30):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    attachment.swap("Sharded(Int8())")
    ddp(data(rank, 1)).backward()
    return replicas_equal(ddp.parameters()), attachment.decisions()


def test_it_can_be_swapped_in_and_out():
    for equal, decisions in run_ranks(swapped, 2):
        assert equal
        assert decisions == []


def without_checks(rank):
    ddp, attachment, hooks = trained(rank, "Mean()", 12, nonfinite="propagate")
    figures = attachment.metrics()
    return torch.equal(flat(ddp.parameters()), plain(rank, 12)), all(hooks), figures


def test_a_mean_without_checks_is_plain_ddp_bit_for_bit():
    """At three ranks a lane divides where DDP multiplies by a third."""
    for equal, hooked, figures in run_ranks(without_checks, 3):
        assert equal
        assert hooked
        assert figures["comm/steps"] == 12
        assert figures["comm/queued_seconds"] == figures["comm/seconds"] == 0  # no lane was there


def loaded_without_a_hook(rank):
    """What each forecast was made of, before and after a state is loaded."""
    auto, planned, real = gl.Auto(among=AMONG), [], choosing.ddp_buckets
    nothing_pays = dict.fromkeys((OFF, *AMONG), 1e6)
    scripted(auto, lambda now: 1.0, nothing_pays)

    def noted(slots, *args):
        planned.append(len(slots))
        return real(slots, *args)

    choosing.ddp_buckets = noted
    ddp, attachment, _ = trained(rank, auto, 20)
    attachment.load_state_dict(attachment.state_dict())
    for step in range(20):
        ddp(data(rank, step)).backward()
    return planned, sum(p.requires_grad for p in ddp.parameters())


def test_after_a_load_without_a_hook_all_parameters_are_watched_again():
    for planned, parameters in run_ranks(loaded_without_a_hook, 2):
        assert planned == [parameters] * 2


def swapped_before_a_hook(rank):
    ddp, attachment, hooks = trained(rank, gl.Auto(), 3)
    attachment.swap("Sharded(Int8())")
    attachment_bytes = attachment.metrics()["comm/bytes_wire"]
    ddp(data(rank, 3)).backward()
    sent = attachment.metrics()["comm/bytes_wire"] - attachment_bytes
    return any(hooks), registered_hook(ddp) is not None, sent, attachment.metrics()["comm/step/bytes_raw"]


def test_a_swap_needs_the_hook_that_auto_did_not():
    for before, after, sent, raw in run_ranks(swapped_before_a_hook, 2):
        assert not before
        assert after
        assert sent < 0.5 * raw


def drifting(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    gl.attach(ddp, gl.Auto("exact"), verify_every=5)
    for step in range(20):
        if step == 7 and rank == 1:
            with torch.no_grad():
                ddp.module.layers[0].weight[0, 0] += 1
        try:
            ddp(data(rank, step)).backward()
        except gl.RanksDisagree as error:
            return step, str(error)
    return None


def test_weights_are_verified_in_plain_steps_too():
    for step, message in run_ranks(drifting, 3):
        assert step == 9
        assert "layers.0.weight" in message


def sparse(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(SparseLookup())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    auto = gl.Auto(among=AMONG)
    told = {OFF: 1.0, INT8: 0.5, INT4: 0.4}
    scripted(auto, lambda now: told[now], told)
    attachment = gl.attach(ddp, auto)
    for step in range(60):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    return attachment.decisions()[-1].strategy, replicas_equal(ddp.parameters())


def test_sparse_gradients_stay_plain_and_the_others_follow_the_choice():
    assert run_ranks(sparse, 2) == [(INT4, True)] * 2


def hooked_by_the_user(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    auto = gl.Auto(among=AMONG)
    told = {OFF: 1.0, INT8: 0.5, INT4: 0.4}
    scripted(auto, lambda now: told[now], told)
    gl.attach(ddp, auto)
    ddp.register_comm_hook(None, compat.allreduce_hook)
    for step in range(60):
        ddp(data(rank, step)).backward()


def test_a_hook_of_the_user_is_an_error_when_the_own_one_is_needed():
    with pytest.raises(RankFailed, match="registered since Auto was attached"):
        run_ranks(hooked_by_the_user, 2)


def closed(rank):
    ddp, attachment, _ = trained(rank, gl.Auto(), 4)
    attachment.close()
    ddp(data(rank, 4)).backward()  # there never was a hook, so DDP goes on
    attachment = gl.attach(ddp, "Sharded(Int8())")
    ddp(data(rank, 5)).backward()
    return replicas_equal(ddp.parameters()), attachment.metrics()["comm/ratio"]


def test_after_close_ddp_goes_on_and_takes_another_strategy():
    for equal, ratio in run_ranks(closed, 2):
        assert equal
        assert ratio > 3
