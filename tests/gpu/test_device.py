"""The emulated device itself: it finds what it is there to find, and nothing else."""

import sys

import pytest
import torch

from .ranks import needs_compiler, run

pytestmark = needs_compiler


def alone(rank, what):
    return what(sys.modules[f"{__package__}.device"])


def kinds(device):
    return sorted({kind for kind, _, _ in device.races()})


def orders(device):
    main, side = torch.accelerator.current_stream(), torch.Stream(device.DEVICE)
    found = {}

    def note(name):
        found[name] = kinds(device)

    x = torch.zeros(10, device=device.DEVICE)
    with side:
        x + 1
    note("read on another stream")
    with side:
        x.add_(1)
    note("write on another stream")
    side.wait_stream(main)
    with side:
        y = x * 2
    note("after a wait")
    x.add_(1)
    note("write after read")
    event = side.record_event()
    main.wait_event(event)
    y.add_(1)
    note("after an event")
    future = torch.futures.Future(devices=[device.DEVICE])
    with side:
        y.mul_(1) if main.record_event().wait(side) is None else None
        future.set_result(y)
    future.value() + 1
    note("value of a future")
    future.wait() + 1
    note("waited for a future")
    halves = torch.zeros(10, device=device.DEVICE)
    side.wait_stream(main)
    halves[:5].add_(1)
    with side:
        halves[5:].add_(1)
    note("other bytes")
    return found


def memory(device):
    side, other = torch.Stream(device.DEVICE), torch.Stream(device.DEVICE)
    found = {}
    for name in ("dropped", "recorded", "waited for"):
        with side:
            x = torch.ones(100, device=device.DEVICE)
        other.wait_stream(side)
        with other:
            x * 2
        if name == "recorded":
            x.record_stream(other)
        if name == "waited for":
            side.wait_stream(other)
        del x
        with side:
            torch.ones(100, device=device.DEVICE)
        found[name] = kinds(device)
        torch.accelerator.synchronize()
    return found


def host(device):
    x = torch.arange(4.0).to(device.DEVICE)
    pinned, pageable = torch.zeros(4, pin_memory=True), torch.zeros(4)
    device.log.clear()
    pinned.copy_(x, non_blocking=True)
    early = pinned.tolist()
    event = torch.accelerator.current_stream().record_event()
    waits = [device.log.all_waits]
    event.synchronize()
    waits.append(device.log.all_waits)
    calls = (
        lambda: pageable.copy_(x, non_blocking=True), lambda: x.sum().item(), lambda: x[x > 1],
        lambda: bool(x[0]),
        lambda: x.nonzero(), lambda: x[torch.tensor([1, 2])], lambda: x.add_(pageable.to(x.device)),
        lambda: x.masked_fill_(x > 1, 0.0), lambda: x.add_(torch.tensor(3.0)), lambda: x[1:3].sort(),
    )  # fmt: skip
    for call in calls:
        device.log.clear()
        call()
        waits.append(device.log.all_waits)
    return early, pinned.tolist(), waits


def times(device):
    """A byte that a kernel touches takes a nanosecond; whoever waits is no earlier than what it waits for."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device.DEVICE)
    x, y = (torch.empty(size, device=device.DEVICE) for size in (1000, 100))

    def mark(stream):
        event = torch.Event(device.DEVICE, enable_timing=True)
        event.record(stream)
        return event

    begin = [mark(main), mark(side)]
    x.fill_(1.0)
    with side:
        y.fill_(1.0)
    alone = [mark(main), mark(side)]
    side.wait_stream(main)
    waited = mark(side)
    waits = device.log.all_waits
    torch.accelerator.synchronize()
    found = [begin[0].elapsed_time(alone[0]), begin[1].elapsed_time(alone[1]), begin[1].elapsed_time(waited)]
    plain = main.record_event()
    with pytest.raises(ValueError, match="enable_timing=True"):
        begin[0].elapsed_time(plain)
    return found, device.log.all_waits - waits


def mixed(device):
    x = torch.zeros(4, device=device.DEVICE)
    wrong = (
        lambda: x + torch.zeros(4),
        lambda: torch.cat([x, torch.zeros(1)]),
        lambda: torch.mm(torch.eye(2), x.view(2, 2)),
    )
    found = []
    for call in wrong:
        with pytest.raises(RuntimeError, match="same device"):
            call()
        found.append(True)
    return found


def test_kernels_that_streams_do_not_order_are_found():
    (found,) = run(alone, 1, orders)
    assert found == {
        "read on another stream": ["read after write"],
        "write on another stream": ["read after write", "write after write"],
        "after a wait": [],
        "write after read": ["read after write", "write after read", "write after write"],
        "after an event": [],
        "value of a future": ["read after write"],
        "waited for a future": [],
        "other bytes": [],
    }


def test_memory_that_another_stream_still_uses_is_found():
    (found,) = run(alone, 1, memory)
    assert found == {"dropped": ["freed while in use"], "recorded": [], "waited for": []}


def test_waits_of_the_host_are_counted_and_pinned_memory_is_written_late():
    (found,) = run(alone, 1, host)
    early, late, waits = found
    assert (early, late) == ([0.0] * 4, [0.0, 1.0, 2.0, 3.0])
    assert list(map(bool, waits)) == [False, True] + [True] * 7 + [False] * 3


def test_time_is_counted_in_bytes_and_passes_from_stream_to_stream():
    ((milliseconds, waits),) = run(alone, 1, times)
    assert milliseconds == pytest.approx([4e-3, 4e-4, 4e-3])
    assert waits == 1


def test_tensors_of_two_devices_are_refused():
    assert run(alone, 1, mixed) == [[True] * 3]
