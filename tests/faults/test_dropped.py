"""Who drops a model, or what works on it, without a word leaves nothing behind: no thread, no descriptor."""

import gc
import os
import resource
import threading
import weakref

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

from ..support.leftovers import gone
from ..support.training import build, data, replicas_equal

MEMORY = "ErrorFeedback(Sharded(Int8()))"


def threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def attached(rank):
    ddp = DistributedDataParallel(build())
    gl.attach(ddp, MEMORY, timeout=20)  # not even kept
    return ddp


def attached_in_a_cycle(rank):
    """An observer that knows the model, which DDP keeps where Python's collector does not look."""
    ddp = DistributedDataParallel(build())
    gl.attach(ddp, MEMORY, timeout=20, verify_every=2, observer=lambda event: ddp.training)
    return ddp


def reduced(rank):
    model = build()
    return model, gl.attach_without_ddp(model, MEMORY, timeout=20)


def compat_state(rank):
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(compat.PowerSGDState(None, start_powerSGD_iter=2), compat.powerSGD_hook)
    return ddp


def compat_hook(rank):
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(None, compat.fp16_compress_hook)  # one lane for all models
    return ddp


def closed(rank):
    ddp = DistributedDataParallel(build())
    return ddp, gl.attach(ddp, MEMORY, timeout=20)


def swapped(rank):
    ddp, attachment = closed(rank)
    for step in range(3):
        attachment.swap(("Mean()", MEMORY, "ErrorFeedback(PowerSGD(1))")[step])
        ddp(data(rank, step)).backward()
    return ddp, attachment


WAYS = {way.__name__: way for way in (
    attached, attached_in_a_cycle, reduced, compat_state, compat_hook, closed, swapped
)}  # fmt: skip
GRID = [(world, way) for way in WAYS for world in (2, 3)]
QUICK = ((2, "attached_in_a_cycle"), (3, "attached"), (3, "reduced"), (2, "compat_state"), (2, "swapped"))


def trained(rank, way):
    """A model that trains for two steps and is dropped; whether that was all of it."""
    made = WAYS[way](rank)
    model, session = made if isinstance(made, tuple) else (made, None)
    for step in range(2):
        model(data(rank, step)).backward()
        if way == "reduced":
            session.reduce()
    assert replicas_equal(p.grad for p in model.parameters() if p.requires_grad)
    if way in ("closed", "swapped"):
        session.close()
    return weakref.ref(model)


def sweep(rank, way, times):
    # What torch keeps for itself from the first model on; and a bare hook its lane, for the next model.
    assert trained(rank, "compat_hook" if way == "compat_hook" else "closed")() is None
    gc.collect()
    before = threads_and_descriptors()
    most, alive = (0, 0), 0
    for _ in range(times):
        alive += trained(rank, way)() is not None
        most = tuple(map(max, most, threads_and_descriptors()))
    gc.collect()
    gone(lambda: max(map(int.__sub__, threads_and_descriptors(), before)) <= 0, 5)
    return before, most, threads_and_descriptors(), alive


@pytest.mark.parametrize(
    ("world", "way"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in GRID]
)
def test_a_sweep_leaves_nothing_behind(world, way):
    for before, most, after, alive in run_ranks(sweep, world, way, 12, deadline=100):
        assert max(map(int.__sub__, after, before)) <= 0, (before, most, after)
        # A lane ends a moment after its model; those in a cycle wait for a collection, at eight of them.
        assert most[0] - before[0] < 12 * 8, (before, most)
        if way != "attached_in_a_cycle":
            assert alive == 0  # gone with the last reference, without a collection


def dropped_in_a_thread(rank):
    """The last reference goes on another thread, and the interpreter ends with lanes that are leaving."""
    held = [attached(rank)]
    held[0](data(rank, 0)).backward()
    dropper = threading.Thread(target=held.clear)
    dropper.start()
    dropper.join()
    ddp = attached(rank)
    ddp(data(rank, 1)).backward()
    return replicas_equal(p.grad for p in ddp.parameters() if p.requires_grad)


def test_it_may_be_dropped_on_any_thread():
    assert run_ranks(dropped_in_a_thread, 3) == [True] * 3


def dropped_by_one(rank):
    """One rank drops its model while the others train on: they are told, and it does not hang."""
    ddp = attached(rank)
    for step in range(2):  # the second forward of DDP has a collective of its own
        ddp(data(rank, step)).backward()
    if rank == 1:
        del ddp
        return None
    with pytest.raises(gl.PeerFailed) as caught:
        ddp(data(rank, 2)).backward()
    return type(caught.value).__name__, caught.value.rank


def test_who_drops_its_model_alone_is_named_by_the_others():
    assert run_ranks(dropped_by_one, 3) == [("PeerLost", 1), None, ("PeerLost", 1)]


def simulated(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        simulation = gl.Simulation(MEMORY, world=4)
        simulation.step([{"weight": torch.randn(1 << 16)} for _ in range(4)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_simulations_are_dropped_whole():
    simulated(3)
    assert simulated(50) < 20_000  # kB; one of them holds 4 MB and more
