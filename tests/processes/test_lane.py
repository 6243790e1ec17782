"""The lane itself: what travels, in which order, on which group."""

import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradlane as gl
from gradlane.core.message import message_of, payload_of
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal


@pytest.mark.parametrize(
    "payload",
    [
        (),
        (torch.arange(5.0),),
        (torch.arange(3, dtype=torch.uint8), torch.ones(2, dtype=torch.float64), torch.tensor(7.0)),
        (torch.zeros(0), torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([True, False])),
        (torch.eye(3)[:, 1], torch.ones(2).to(torch.float8_e4m3fn)),
    ],
)
def test_a_payload_survives_as_one_message(payload):
    message = message_of(payload)
    assert message.numel() == sum(part.numel() * part.element_size() for part in payload)
    for sent, got in zip(payload, payload_of(message, payload), strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert torch.equal(message_of((got,)), message_of((sent,)))


def exchanges(rank):
    """Large, small, empty and uneven messages of every kind, over every scope."""
    world = dist.get_world_size()
    wrong = []

    @gl.strategy_from
    async def check(bucket):
        big = 700_000 + 13  # more than two chunks of a MiB
        mine = (torch.full((big,), float(rank)), torch.tensor([rank], dtype=torch.int16), torch.zeros(0))
        for other, (values, number, nothing) in enumerate(await gl.all_gather(mine)):
            if not (values == other).all() or number.item() != other or nothing.numel():
                wrong.append(("gather", other))
        uneven = [(torch.full((1000 * d + 1,), 10.0 * rank + d),) for d in range(world)]
        for other, (values,) in enumerate(await gl.all_to_all(uneven)):
            if values.shape != (1000 * rank + 1,) or not (values == 10 * other + rank).all():
                wrong.append(("to all", other))
        node = await gl.all_gather((torch.tensor([rank]),), over="node")
        if [int(n) for (n,) in node] != [rank // 2 * 2, rank // 2 * 2 + 1]:
            wrong.append(("node", node))
        cross = await gl.all_gather((torch.tensor([rank]),), over="cross")
        if [int(n) for (n,) in cross] != [rank % 2, rank % 2 + 2]:
            wrong.append(("cross", cross))
        for op, expected in (("sum", 6.0), ("max", 3.0), ("min", 0.0), ("mean", 1.5)):
            if (await gl.all_reduce(torch.tensor([float(rank)]), op=op)).item() != expected:
                wrong.append(op)
        if (await gl.all_reduce(torch.tensor([float(rank)]), over="cross")).item() != rank % 2 + 1:
            wrong.append("mean over cross")
        return await gl.all_reduce(bucket.flat)

    ddp = DistributedDataParallel(build(depth=1))
    with gl.attach(ddp, check, ranks_per_node=2, timeout=20):
        ddp(data(rank, 0)).backward()
    return wrong


def test_every_exchange_arrives():
    assert run_ranks(exchanges, 4) == [[]] * 4


def uneven_nodes(rank):
    @gl.strategy_from
    async def across(bucket):
        return await gl.all_reduce(bucket.flat, over="cross")

    ddp = DistributedDataParallel(build(depth=1))
    with pytest.raises(gl.InvalidValue, match="ranks_per_node=2 does not divide the 3 ranks"):
        gl.attach(ddp, across, ranks_per_node=2)
    return True


def test_nodes_must_be_equal():
    assert run_ranks(uneven_nodes, 3) == [True] * 3


@dataclass
class TwoPhases(gl.Strategy):
    """Two collectives with a random pause before each: where completion order differs between ranks."""

    async def reduce(self, bucket):
        pause = random.Random(hash((bucket.rank, bucket.step, bucket.index)))
        time.sleep(pause.random() * 0.002)
        total = await gl.all_reduce(bucket.flat, op="sum")
        time.sleep(pause.random() * 0.002)
        largest = await gl.all_reduce(total.abs().max().view(1), op="max")
        return gl.Reduced(total / bucket.world + 0 * largest)


def many_buckets(rank, megabytes, options, steps):
    ddp = DistributedDataParallel(build(depth=12), bucket_cap_mb=megabytes, **options)
    order = []
    with gl.attach(ddp, TwoPhases(), observer=order.append, timeout=20):
        for step in range(steps):
            ddp.zero_grad()
            ddp(data(rank, step)).backward()
            assert replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])
    return [(event.step, event.bucket, event.phase) for event in order]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("megabytes", [25, 0.006, 0.001])
def test_two_phases_in_one_order_on_every_rank(megabytes, options):
    first, *others = run_ranks(many_buckets, 3, megabytes, options, 6)
    assert all(other == first for other in others)
    assert first == sorted(first)
    buckets = max(bucket for _, bucket, _ in first) + 1
    assert buckets >= {25: 1, 0.006: 4, 0.001: 12}[megabytes]


def test_stream_lane_with_torchs_fake_group():
    """No GPU here: only the control flow, on one process with a group that pretends to be four."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        events = []
        ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
        attachment = gl.attach(ddp, "Cast(Mean(), bfloat16)", observer=events.append)
        for step in range(3):
            ddp.zero_grad()
            ddp(data(0, step)).backward()
        assert attachment.metrics()["comm/steps"] == 3
        assert attachment.metrics()["comm/ratio"] == pytest.approx(2)
        assert {event.kind for event in events} == {"all_reduce"}

        @gl.strategy_from
        async def all_kinds(bucket):
            everyone = await gl.all_gather((bucket.flat.clone(), torch.zeros(3, dtype=torch.uint8)))
            assert [part.shape for part in everyone[3]] == [bucket.flat.shape, (3,)]
            received = await gl.all_to_all([(torch.zeros(7),)] * 4)
            assert len(received) == 4
            return await gl.all_reduce(bucket.flat)

        attachment.swap(all_kinds)
        events.clear()
        ddp(data(0, 3)).backward()
        assert [event.kind for event in events[:3]] == ["all_gather", "all_to_all", "all_reduce"]

        @gl.strategy_from
        async def raises(bucket):
            raise ZeroDivisionError("here")

        attachment.swap(raises)
        with pytest.raises(ZeroDivisionError, match="here"):
            ddp(data(0, 4)).backward()

        @gl.strategy_from
        async def meets(bucket):
            count = await gl.step_sum(torch.ones(()))
            flat = await gl.all_reduce(bucket.flat)
            assert count > 2
            if bucket.step == 6 and bucket.index == 1:
                raise ArithmeticError("after the sum")
            return flat.fill_(float(count))

        attachment.swap(meets)
        ddp.zero_grad()
        ddp(data(0, 5)).backward()
        assert ddp.module.scale.grad > 2
        with pytest.raises(ArithmeticError, match="after the sum"):
            ddp(data(0, 6)).backward()
        attachment.swap("Mean()")
        ddp(data(0, 7)).backward()
        attachment.close()
        del ddp, attachment
    finally:
        dist.destroy_process_group()


def clipped_as_a_whole(rank, broken_at):
    """A norm over several buckets, with delays; one rank raises after the sum, in one step."""
    from ..support.catalogue import ClippedMean

    @dataclass
    class Breaking(ClippedMean):
        async def reduce(self, bucket):
            square = await gl.step_sum(bucket.flat.double().square().sum())
            if (rank, bucket.step, bucket.index) == (1, broken_at, 3):
                raise ArithmeticError("here")
            return gl.Reduced(await gl.all_reduce(bucket.flat / square.sqrt().float()))

    ddp = DistributedDataParallel(build(depth=6), bucket_cap_mb=0.003)
    jitter = random.Random(rank)
    for layer in ddp.module.layers:
        layer.weight.register_hook(lambda grad: time.sleep(jitter.random() * 0.004))
    norms, errors = [], []
    with gl.attach(ddp, Breaking(), timeout=20) as attachment:
        for step in range(5):
            ddp.zero_grad()
            try:
                ddp(data(0, step)).backward()  # the same data: then the mean has the norm of each
            except (ArithmeticError, gl.PeerFailed) as error:
                errors.append((step, type(error).__name__))
            else:
                norms.append(
                    torch.cat([p.grad.flatten() for p in ddp.parameters() if p.requires_grad]).norm()
                )
        assert attachment.metrics()["comm/collectives"] >= 4 * 4  # several buckets in each step
    return [round(float(norm), 4) for norm in norms], errors


def test_a_step_sum_spans_the_buckets_of_a_backward_and_a_failure_after_it_loses_one_step():
    norms, errors = zip(*run_ranks(clipped_as_a_whole, 3, 2), strict=True)
    assert norms == ([1.0] * 4,) * 3
    assert errors == ([(2, "PeerFailed")], [(2, "ArithmeticError")], [(2, "PeerFailed")])


def kept_for_a_step(rank):
    """What came first is still what it was when more has come, in every bucket; no more is promised."""
    wrong = []

    @gl.strategy_from
    async def twice(bucket):
        first = await gl.all_gather((bucket.flat.clone(),))
        second = await gl.all_gather((bucket.flat * 2,))
        third = await gl.all_to_all([(bucket.flat * 4,)] * bucket.world)
        for (one,), (two,), (four,) in zip(first, second, third, strict=True):
            if not (torch.equal(one * 2, two) and torch.equal(one * 4, four)):
                wrong.append((bucket.step, bucket.index))
        return torch.stack([one for (one,) in first]).mean(0)

    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    with gl.attach(ddp, twice, timeout=20):
        for step in range(3):
            ddp(data(rank, step)).backward()
    return wrong


def test_an_answer_is_its_strategys_until_the_step_ends():
    assert run_ranks(kept_for_a_step, 3) == [[], [], []]
