"""Two nodes of two ranks: ``Hierarchical`` on real processes and real connections."""

import itertools
import socket
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradlane as gl
from gradlane.core.scopes import scopes_of
from gradlane.lane.nodes import scope_groups
from gradlane.lane.stream import StreamLane
from gradlane.local import run_ranks
from gradlane.telemetry.ledger import Ledger

from ..faults.faulty import MOMENTS, Broken, Faulty, Point
from ..support.catalogue import STRATEGIES
from ..support.grids import every
from ..support.training import build, data, flat, replicas_equal

NODES = {"ranks_per_node": 2, "timeout": 20}
NAMES = [name for name in STRATEGIES if "hierarchical" in name]
INT4 = "Hierarchical(ErrorFeedback(Sharded(Int4())))"


def trained(rank, strategies, steps, **ddp_options):
    """Whether replicas stay equal; the weights, by strategy."""
    found = []
    for strategy in strategies:
        ddp = DistributedDataParallel(build(), **{"bucket_cap_mb": 0.004, **ddp_options})
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        attachment = None if strategy is None else gl.attach(ddp, strategy(), **NODES)
        for step in range(steps):
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
        found.append((replicas_equal(ddp.parameters()), flat(ddp.parameters())))
        if attachment is not None:
            attachment.close()
    return found


@pytest.mark.parametrize("steps", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_replicas_are_bit_equal_and_the_mean_is_that_of_ddp(steps):
    strategies = [None, *(STRATEGIES[name] for name in NAMES)]
    everyone = run_ranks(trained, 4, strategies, steps, deadline=280)
    for plain, *found in everyone:
        assert all(equal for equal, _ in found), [n for n, (e, _) in zip(NAMES, found, strict=True) if not e]
        mean = found[NAMES.index("hierarchical")][1]
        torch.testing.assert_close(mean, plain[1], rtol=1e-4, atol=1e-5)


def joined(rank, active):
    """Rank 0 runs out of data first."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    gradients = []
    work = gl.attach(ddp, gl.Hierarchical(gl.Mean()), **NODES) if active else nullcontext()
    with work, ddp.join(divide_by_initial_world_size=False):
        for step in range(2 if rank == 0 else 4):
            ddp.zero_grad()
            ddp(data(rank, step)).backward()
            gradients.append(flat([p.grad for p in ddp.parameters() if p.requires_grad]))
    return gradients


def test_a_mean_divides_by_the_ranks_that_still_train():
    ours, torchs = run_ranks(joined, 4, True), run_ranks(joined, 4, False)
    for mine, theirs in zip(itertools.chain(*ours), itertools.chain(*torchs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def wire(rank, text):
    """Bytes by scope of a step, as counted, and the number of residual elements of this rank."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64)))
    events = []
    with gl.attach(ddp, text, observer=events.append, **NODES) as attachment:
        for step in range(2):
            ddp(data(rank, step, width=128)).square().mean().backward()
        kept = attachment.strategy.cross.memory.state_dict()
    bytes_over = {
        over: sum(event.wire_bytes for event in events if event.over == over and event.step == 1)
        for over in ("node", "cross", "world")
    }
    return bytes_over, sum(tensor.numel() for tensor in kept.values())


def test_a_rank_carries_its_part_across_and_keeps_no_more():
    elements = 128 * 256 + 256 + 256 * 64 + 64
    for bytes_over, kept in run_ranks(wire, 4, INT4):
        assert kept == elements // 2
        assert bytes_over["world"] == 0
        assert bytes_over["cross"] == pytest.approx(elements // 2 * (0.5 + 4 / 256), rel=0.02)
        assert bytes_over["node"] == pytest.approx(4 * elements, rel=0.02)


def raising(rank, points):
    return [_raised_at(rank, point) for point in points]


def _raised_at(rank, point):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    caught, seconds = [], 0.0
    with gl.attach(ddp, Faulty(gl.parse(INT4), point), **NODES):
        for step in range(6):
            optimizer.zero_grad()
            start = time.monotonic()
            try:
                ddp(data(rank, step)).backward()
            except (Broken, gl.PeerFailed) as error:
                caught.append((step, type(error).__name__))
                seconds = time.monotonic() - start
                continue
            optimizer.step()
        return caught, seconds, replicas_equal(ddp.parameters())


def test_a_rank_that_raises_fails_the_step_on_all_ranks_of_both_nodes():
    points = [
        Point(rank, 2, bucket, moment)
        for rank, bucket, moment in zip((0, 1, 2, 3), (0, 1, -1, 1), MOMENTS, strict=True)
    ]
    everyone = run_ranks(raising, 4, points, deadline=120)
    for number, point in enumerate(points):
        for rank, found in enumerate(everyone):
            caught, seconds, equal = found[number]
            assert caught == [(2, "Broken" if rank == point.rank else "PeerFailed")], (point, rank)
            assert seconds < 3
            assert equal


def skipping(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with gl.attach(ddp, INT4, **NODES) as attachment:
        for step in range(5):
            optimizer.zero_grad()
            (ddp(data(rank, step)) * (torch.nan if (rank, step) == (3, 2) else 1.0)).backward()
            if step == 2:
                assert attachment.skipped
            optimizer.step()
        return attachment.metrics()["comm/skipped"], replicas_equal(ddp.parameters())


def test_nan_on_one_rank_is_skipped_by_all():
    assert run_ranks(skipping, 4) == [(1, True)] * 4


def saved_and_resumed(rank, folder, size):
    """Three steps, a checkpoint, and three more; once without a stop, and once with a new model."""
    ddp, attachment = _attached(size)
    _steps(ddp, rank, range(3))
    attachment.save(folder)
    middle = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    _steps(ddp, rank, range(3, 6))
    unstopped = flat(ddp.parameters())
    attachment.close()
    ddp, attachment = _attached(size)
    with torch.no_grad():
        for name, parameter in ddp.module.named_parameters():
            parameter.copy_(middle[name])
    attachment.load(folder)
    _steps(ddp, rank, range(3, 6))
    return torch.equal(unstopped, flat(ddp.parameters()))


def _attached(size):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    return ddp, gl.attach(ddp, INT4, ranks_per_node=size, timeout=20)


def _steps(ddp, rank, steps):
    for step in steps:
        ddp.zero_grad()
        ddp(data(rank, step)).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad


def test_a_resumed_run_is_the_same(tmp_path):
    assert run_ranks(saved_and_resumed, 4, str(tmp_path / "checkpoint"), 2) == [True] * 4


def other_nodes(rank, folder, size, save):
    ddp, attachment = _attached(size)
    if save:
        _steps(ddp, rank, range(3))
        attachment.save(folder)
    else:
        attachment.load(folder)
    kept = attachment.strategy.cross.memory.state_dict()
    total = sum(tensor.double().sum() for tensor in kept.values())
    _steps(ddp, rank, range(3, 5))
    return float(total)


@pytest.mark.parametrize(("world", "size"), every(2, [(8, 4), (8, 2), (6, 3), (4, 2)]))
def test_other_nodes_go_on_with_the_same_residual(tmp_path, world, size):
    saved = run_ranks(other_nodes, 4, str(tmp_path / "checkpoint"), 2, True)
    loaded = run_ranks(other_nodes, world, str(tmp_path / "checkpoint"), size, False)
    assert sum(loaded) == pytest.approx(sum(saved), rel=1e-4, abs=1e-6)


def unequal(rank):
    ddp = DistributedDataParallel(build())
    socket.gethostname = lambda: "left" if rank < 2 else "right"
    with pytest.raises(gl.InvalidValue, match="nodes with equally many ranks"):
        gl.attach(ddp, INT4, timeout=20)
    with gl.attach(ddp, "Mean()", timeout=20) as attachment:
        with pytest.raises(gl.InvalidValue, match="nodes with equally many ranks"):
            attachment.swap(INT4)
        _steps(ddp, rank, range(2))
    return True


def test_nodes_of_different_sizes_are_refused_by_all_ranks():
    assert run_ranks(unequal, 3) == [True] * 3


def on_streams(rank, names):
    """The lane for NCCL, on groups of Gloo: its requests, its groups and their order are the same."""
    nodes = [[0, 1], [2, 3]]
    scopes = scopes_of(rank, nodes)
    groups = scope_groups(dist.group.WORLD, nodes, scopes, 20.0)
    assert [groups[over].size() for over in ("world", "node", "cross")] == [4, 2, 2]
    lane = StreamLane(groups, torch.device("cpu"), Ledger())
    found = []
    for name in names:
        strategy = STRATEGIES[name]()
        strategy.enter(scopes, {})
        given = gradients_of(rank)
        bucket = gl.Bucket(
            flat=torch.cat([grad.reshape(-1) for grad in given.values()]),
            layout=tuple(gl.Slot(key, grad.shape) for key, grad in given.items()),
            step=0, rank=rank, world=4, sizes=scopes.sizes, places=scopes.places,
        )  # fmt: skip
        found.append(lane.submit(strategy, bucket, raises=True).wait())
        assert lane.take_failure() is None
    return found


def gradients_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return {"w": torch.randn(24, 8, generator=generator), "b": torch.randn(7, generator=generator)}


def test_the_lane_for_nccl_asks_the_groups_of_each_scope():
    everyone = run_ranks(on_streams, 4, NAMES)
    for number, name in enumerate(NAMES):
        ranks = gl.Simulation(STRATEGIES[name](), world=4, node_size=2)
        answer = ranks.step([gradients_of(rank) for rank in range(4)])
        for rank, found in enumerate(everyone):
            simulated = torch.cat([grad.reshape(-1) for grad in answer[rank].values()])
            torch.testing.assert_close(found[number], simulated, rtol=1e-6, atol=1e-7)


def test_attach_makes_the_groups_of_nccl():
    """No GPU here: only the control flow, with a group that pretends to be four."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        events = []
        ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
        with gl.attach(ddp, INT4, observer=events.append, ranks_per_node=2) as attachment:
            ddp(data(0, 0)).backward()
            assert attachment.metrics()["comm/steps"] == 1
        assert {(event.kind, event.over) for event in events} == {
            ("reduce_scatter", "node"),
            ("all_gather", "cross"),
            ("all_gather", "node"),
        }
        with gl.attach(ddp, "Mean()", ranks_per_node=2) as attachment:
            with pytest.raises(gl.InvalidValue, match="attach it from the start"):
                attachment.swap(INT4)
            ddp(data(0, 1)).backward()
        del ddp, attachment
    finally:
        dist.destroy_process_group()
