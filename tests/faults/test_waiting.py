"""How long a rank waits for another: as long as its process group does, or as the user says. And the error
names an option that the user has."""

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.agree.limits import limit_of_group, torch_default_timeout
from gradlane.integrations import lightning_checkpoints
from gradlane.integrations.agreed_weights import AgreedWeights
from gradlane.local import run_ranks

from ..support.training import build, data
from .faulty import Broken, Faulty, Point, fire
from .harness import Warnings, leave_the_lost, run
from .harness import connect as harness_connect

LONGER = "give its process group a longer timeout"


def quick_first(first, second, *others):
    return [first, second, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


def connect(rank, path, world, seconds):
    store = dist.FileStore(path, world)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    store.set(f"connected/{rank}", "yes")
    store.wait([f"connected/{other}" for other in range(world)])


def stepping(way):
    """A function of rank and step that trains in one of the ways, without a word about time."""
    if way == "own_loop":
        model = build()
        own_loop = gl.attach_without_ddp(model, "Mean()")

        def step_without_ddp(rank, step):
            model(data(rank, step)).backward()
            own_loop.reduce()

        return step_without_ddp
    ddp = DistributedDataParallel(build())
    if way == "attach":
        attachment = gl.attach(ddp, "Mean()")
        assert attachment.settings.timeout is None
    elif way == "hook":
        ddp.register_comm_hook(None, compat.fp16_compress_hook)
    else:
        ddp.register_comm_hook(compat.PowerSGDState(None, start_powerSGD_iter=2), compat.powerSGD_hook)
    return lambda rank, step: ddp(data(rank, step)).backward()


def one_stays_away(rank, path, way, world, seconds, pause):
    """From step 3: which error the others get, when, and what they logged before."""
    warnings = Warnings()
    connect(rank, path, world, seconds)
    try:
        return _one_stays_away(rank, way, world, pause), [line for _, line in warnings.lines]
    finally:
        gl.shutdown(timeout=0.2)


def _one_stays_away(rank, way, world, pause):
    train = stepping(way)
    for step in range(5):
        if rank == world - 1 and step == 3:
            time.sleep(pause)
        began = time.monotonic()
        try:
            train(rank, step)
        except gl.PeerFailed as error:
            return str(error), error.rank, time.monotonic() - began
    return None


@pytest.mark.parametrize("way", quick_first("hook", "own_loop", "attach", "powersgd hook"))
def test_a_rank_waits_as_long_as_its_process_group_and_is_told_so(way):
    """It used to be 120 s in any case, and the message of hooks spoke of a ``timeout=`` they do not have."""
    world = 3 if way == "hook" else 2
    outcomes = run_ranks(one_stays_away, world, way, world, 2.0, 4.0, init=False, deadline=40)
    for (message, lost, seconds), lines in outcomes[:-1]:
        assert lost == world - 1, message
        assert 1.5 < seconds < 4.5
        assert "within 2 s" in message
        assert LONGER in message
        assert any(f"rank {world - 1} has not entered" in line for line in lines)


@pytest.mark.parametrize("way", ["attach", pytest.param("hook", marks=pytest.mark.slow)])
def test_who_is_late_by_less_than_that_is_waited_for(way):
    assert [found for found, _ in run_ranks(one_stays_away, 2, way, 2, 20.0, 1.0, init=False)] == [None] * 2


def limits(rank, path):
    connect(rank, path, 2, 77.0)
    cpu = torch.device("cpu")
    groups = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=5)), dist.new_group([0, 1])]
    found = [limit_of_group(group, cpu).seconds for group in groups]
    board = gl.attach(DistributedDataParallel(build()), "Mean()")._step.lane.board
    dist.destroy_process_group(groups[1])
    return found, board.timeout


def test_the_limit_is_that_of_the_very_group():
    half_an_hour = 1800.0
    assert run_ranks(limits, 2, init=False) == [([77.0, 5.0, half_an_hour], 77.0)] * 2


def test_a_group_that_does_not_tell_has_what_torch_gives_one(monkeypatch):
    class Silent:
        def size(self):
            return 2

        def _get_backend(self, device):
            raise RuntimeError("no backend for this device")

    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    seconds = torch_default_timeout("gloo").total_seconds()
    assert limit_of_group(Silent(), torch.device("cpu")).seconds == seconds == 1800


def rank_0_saves_long(rank, folder, timeouts):
    """Its own file takes two seconds; the others are in ``attachment.save`` meanwhile, as the docs say."""
    warnings = Warnings()
    ddp = DistributedDataParallel(build())
    at_attach, at_save = timeouts
    with gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=at_attach) as attachment:
        ddp(data(rank, 0)).backward()
        if rank == 0:
            time.sleep(2)
        try:
            attachment.save(folder, timeout=at_save)
        except gl.PeerLost as error:
            return str(error)
        attachment.load(folder)
    return [line for _, line in warnings.lines]


@pytest.mark.parametrize("timeouts", [(None, None), (1, 30)])
def test_the_documented_order_of_saving_waits_for_rank_0(timeouts, tmp_path):
    first, *others = run_ranks(rank_0_saves_long, 3, str(tmp_path), timeouts)
    assert first == []
    assert len(others) == 2
    for lines in others:
        assert all("save: rank 0 has not come (waited" in line for line in lines)


def test_a_short_timeout_says_how_to_save_with_a_longer_one(tmp_path):
    for message in run_ranks(rank_0_saves_long, 3, str(tmp_path), (1, None))[1:]:
        assert "save: rank 0 did not take part within 1 s" in message
        assert "give this call more time on all ranks: save(folder, timeout=3600)" in message


def one_attaches_late(rank, pause):
    warnings = Warnings()
    ddp = DistributedDataParallel(build())
    if rank == 1:
        time.sleep(pause)
    with gl.attach(ddp, "Mean()", timeout=8):
        return [line for _, line in warnings.lines]


def test_who_does_not_come_to_attach_is_named_long_before_it_is_an_error():
    first, late, last = run_ranks(one_attaches_late, 3, 3.0)
    assert late == []
    for lines in (first, last):
        (line,) = lines
        assert line.startswith("attach: rank 1 has not come (waited 2")


class Fit:
    """What Lightning's callback is for a checkpoint, after an exception."""

    def __init__(self, attachment, failure):
        self.attachment, self.failure, self.agreed = attachment, failure, AgreedWeights()


def save_after_an_exception(rank, folder):
    """Rank 1 raised alone, and does not save: what it was must be seen, not how long a group may wait."""
    ddp = DistributedDataParallel(build())
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))")
    ddp(data(rank, 0)).backward()
    attachment.close()
    if rank == 1:
        time.sleep(3)
        return None
    fit, began = Fit(attachment, OSError("no more data here")), time.monotonic()
    lightning_checkpoints._save_folder(fit, Path(folder, "last.ckpt"))
    notes = getattr(fit.failure, "__notes__", [str(fit.failure)])  # Python 3.10 has none
    return notes, time.monotonic() - began


def test_a_checkpoint_after_an_exception_does_not_wait_for_those_who_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lightning_checkpoints, "AFTER_FAILURE", 1.0)
    ([note], seconds), _ = run_ranks(save_after_an_exception, 2, str(tmp_path), deadline=20)
    assert "last.ckpt has no memory of the ranks (save: rank 1 did not take part within 1 s" in note
    assert seconds < 3


def one_gives_up(rank):
    """Rank 1 fails in the middle of a backward, and closes, while it waits for rank 0; it stays alive."""
    warnings = Warnings()
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    attachment = gl.attach(ddp, "Sharded(Raw())", timeout=20)
    for step in range(2):
        ddp(data(rank, step)).backward()
    loss = ddp(data(rank, 2))
    if rank == 1:
        ddp.module.layers[0].weight.register_hook(fail)  # the last in backward
    if rank == 0:
        time.sleep(1.5)
    began = time.monotonic()
    with pytest.raises((OSError, gl.PeerFailed)) as caught:
        loss.backward()
    attachment.close()
    seconds = time.monotonic() - began
    if rank == 1:
        time.sleep(max(0.0, 6.5 - seconds))
    return type(caught.value).__name__, str(caught.value), seconds, [line for _, line in warnings.lines]


def fail(gradient):
    raise OSError("no more memory here")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_who_closes_in_the_middle_of_a_step_does_not_let_the_others_wait(world):
    """They used to wait for the timeout, or for its end."""
    outcomes = run_ranks(one_gives_up, world, deadline=40)
    assert outcomes[1][:2] == ("OSError", "no more memory here")
    assert "closed while waiting for a peer (Sharded, step 2, bucket 0" in outcomes[1][3][-1]
    for rank, (name, message, seconds, _) in enumerate(outcomes):
        assert seconds < 4.5, message
        if rank != 1:
            assert name == "PeerFailed"
            assert "rank 1 raised WrongState: closed in the middle of this step" in message


def dies_before(rank, path, call, folder, world):
    harness_connect(rank, path, world)
    story = _dies_before(rank, call, folder, world)
    leave_the_lost()
    return story


def _dies_before(rank, call, folder, world):
    ddp = DistributedDataParallel(build())
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))")  # with the group's own timeout
    for step in range(2):
        ddp(data(rank, step)).backward()
    attachment.save(folder)
    if rank == world - 1:
        time.sleep(0.5)
        fire("kill", 0.0, call)
    began = time.monotonic()
    given = "Mean()" if call == "swap" else folder
    with pytest.raises(gl.PeerLost, match=f"{call}: rank {world - 1} is gone: its conn") as caught:
        getattr(attachment, call)(given)
    attachment.close()
    return caught.value.rank, time.monotonic() - began


@pytest.mark.parametrize(
    ("call", "world"),
    [
        ("save", 3),
        pytest.param("load", 2, marks=pytest.mark.slow),
        pytest.param("swap", 3, marks=pytest.mark.slow),
    ],
)
def test_who_dies_while_the_others_meet_it_is_named_within_seconds(call, world, tmp_path):
    """It used to look like one that is slow, until the timeout."""
    story = run(dies_before, world, call, str(tmp_path), world, deadline=40, victim=world - 1)
    assert story.codes[world - 1] == -signal.SIGKILL
    assert set(story.results) == set(range(world - 1)), story.failures
    for lost, seconds in story.results.values():
        assert lost == world - 1
        assert seconds < 5


def meet_after_a_long_wait(rank, folder):
    """What asks whether a rank is gone does not disturb it, nor what follows."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=20)
    for step in range(6):
        if step == 2:
            if rank == 1:
                time.sleep(2.2)
            attachment.save(folder)
        if step == 5 and rank == 0:
            time.sleep(1)
            attachment.strategy = Faulty(attachment.strategy, Point(0, 5, 1, "encoded"))
        try:
            ddp(data(rank, step)).backward()
        except (Broken, gl.PeerFailed) as error:
            return step, type(error).__name__, getattr(error, "rank", None)
    return None


def test_to_ask_who_is_gone_disturbs_nobody(tmp_path):
    outcomes = run_ranks(meet_after_a_long_wait, 3, str(tmp_path), deadline=40)
    assert outcomes == [(5, "Broken", None), (5, "PeerFailed", 0), (5, "PeerFailed", 0)]
