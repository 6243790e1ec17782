"""The model of a step: cases that can be computed by hand, closed forms, and the message-level reference."""

from __future__ import annotations

import math

import pytest

from gradlane.errors import InvalidValue
from gradlane.plan.beat import Beat, even_beat, typical_beat
from gradlane.plan.curves import PRIMITIVES, Curve, Curves
from gradlane.plan.fluid import Fluid, Work, fair_shares
from gradlane.plan.pipeline import Forecast, step_seconds
from gradlane.plan.scale import INSIDE_DELAY, INSIDE_RATE, curves_of_link, for_ranks
from gradlane.plan.work import BucketWork, Phase, dense_work
from tests.reference.plan_messages import step_of_rings

MB = 10**6


def straight(latency: float, rate: float, world: int = 2, **figures: float) -> Curves:
    """A link without any detail: latency and rate."""
    points = ((4096.0, latency + 4096 / rate), (1e9, latency + 1e9 / rate))
    return Curves(world, dict.fromkeys(PRIMITIVES, Curve(points, **figures)))


def gathered(size: int, encode: float = 0.0, decode: float = 0.0) -> BucketWork:
    return BucketWork((Phase("all_gather", "world", size, encode),), decode, 4 * size)


def seconds(beat: Beat, buckets: list[BucketWork], curves: Curves, cores: float = 9.0) -> float:
    return step_seconds(beat, buckets, curves, cores=cores, commit=False).seconds


def test_a_request_of_the_last_bucket_is_exposed_and_others_hide() -> None:
    curves = straight(0.01, 100 * MB)
    beat = Beat(rest=1.0, gaps=(0.5,), tail=0.2)
    # The first request ends at 1.21, the second begins at 1.5 and ends at 1.71, as compute ends at 1.7.
    assert seconds(beat, [gathered(20 * MB), gathered(20 * MB)], curves) == pytest.approx(1.71, abs=1e-4)
    # Compute that goes on for longer hides both.
    longer = Beat(rest=1.0, gaps=(0.5,), tail=0.5)
    assert seconds(longer, [gathered(20 * MB), gathered(20 * MB)], curves) == pytest.approx(2.0)


def test_requests_under_way_share_the_line_but_not_the_latency() -> None:
    curves = straight(0.1, 100 * MB)
    together = Beat(rest=1.0, gaps=(0.0, 0.0), tail=0.0)
    three = [gathered(20 * MB) for _ in range(3)]
    assert seconds(together, three, curves) == pytest.approx(1.0 + 0.1 + 3 * 0.2, abs=1e-3)
    # Gloo has two all-reduces of a group under way: the third one's latency comes after the first one's end.
    rings = dense_work([20 * MB] * 3)
    assert seconds(together, list(rings), curves) == pytest.approx(1.0 + 0.1 + 0.4 + 0.1 + 0.2, abs=1e-3)


def test_encoding_delays_compute_and_decoding_delays_the_lane() -> None:
    curves = straight(0.0, 1e15)
    beat = Beat(rest=1.0, gaps=(1.0,), tail=0.5)
    encoded = [gathered(MB, encode=0.25), gathered(MB, encode=0.25)]
    assert seconds(beat, encoded, curves) == pytest.approx(3.0, abs=1e-6)
    decoded = [gathered(MB, decode=0.25), gathered(MB, decode=0.75)]
    assert seconds(beat, decoded, curves) == pytest.approx(2.75, abs=1e-6)
    # With one core for both, decoding takes compute's time: all work is done one after the other.
    assert seconds(beat, decoded, curves, cores=1.0) == pytest.approx(3.5, abs=1e-6)


def test_the_network_takes_cores_from_compute() -> None:
    """A transfer that keeps half a core busy for two seconds, beside compute on one core."""
    curves = straight(0.0, 10 * MB, cpu_per_byte=0.5 / (10 * MB))
    beat = Beat(rest=0.0, gaps=(), tail=2.0)
    assert seconds(beat, [gathered(20 * MB)], curves, cores=1.5) == pytest.approx(2.0, rel=1e-3)
    assert seconds(beat, [gathered(20 * MB)], curves, cores=1.0) == pytest.approx(3.0, rel=1e-3)


def test_later_phases_are_served_bucket_by_bucket() -> None:
    curves = straight(0.1, 1e12)
    two = BucketWork((Phase("all_to_all", "world", MB, 0.0), Phase("all_gather", "world", MB, 0.0)), 0.0)
    beat = Beat(rest=1.0, gaps=(0.0, 0.0), tail=0.0)
    # First requests overlap; each later one waits for the one before.
    assert seconds(beat, [two, two, two], curves) == pytest.approx(1.0 + 0.1 + 3 * 0.1, abs=1e-3)


def test_what_waits_for_the_step_comes_after_its_last_bucket() -> None:
    curves = straight(0.1, 1e12)
    late = BucketWork((Phase("all_reduce", "world", 8, 0.0, after_all=True),), 0.0)
    beat = Beat(rest=1.0, gaps=(1.0,), tail=0.0)
    assert seconds(beat, [late, late], curves) == pytest.approx(2.0 + 0.2, abs=1e-3)
    # The same without the wait: the first bucket's request hides.
    free = BucketWork((Phase("all_reduce", "world", 8, 0.0),), 0.0)
    assert seconds(beat, [free, free], curves) == pytest.approx(2.0 + 0.1, abs=1e-3)


def test_the_commit_is_one_small_request_and_only_where_something_was_sent() -> None:
    curves = straight(0.1, 1e12)
    beat = Beat(rest=1.0, gaps=(), tail=0.0)

    def with_commit(work: BucketWork) -> float:
        return step_seconds(beat, [work], curves, cores=9, commit=True).seconds

    assert with_commit(gathered(MB)) == pytest.approx(1.2, abs=1e-3)
    assert with_commit(BucketWork((), 0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("cores", [0.5, 1.0, 2.5])
def test_more_of_anything_never_makes_a_step_shorter(cores: float) -> None:
    sizes = [MB, 25 * MB, 25 * MB]
    beat = even_beat(0.2, sizes)
    works = [gathered(size // 4, 0.004, 0.003) for size in sizes]
    curves = straight(1e-3, 100 * MB, cpu_per_byte=4e-10)
    base = seconds(beat, works, curves, cores)
    assert base >= beat.compute
    assert seconds(beat.lasting(0.3), works, curves, cores) > base
    assert seconds(beat, works, straight(5e-3, 100 * MB, cpu_per_byte=4e-10), cores) > base
    assert seconds(beat, works, straight(1e-3, 50 * MB, cpu_per_byte=4e-10), cores) > base
    heavier = [gathered(size // 4, 0.008, 0.003) for size in sizes]
    assert seconds(beat, heavier, curves, cores) > base
    assert seconds(beat, works, curves, cores / 2) >= base


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("delay", [0.0, 2e-4])
def test_the_pipeline_agrees_with_every_message(ranks: int, delay: float) -> None:
    rate = 125 * MB
    sizes = [MB, 8 * MB, 8 * MB, 4 * MB]
    beat = Beat(rest=0.05, gaps=(0.06, 0.04, 0.02), tail=0.01)
    ready = [0.05, 0.11, 0.15, 0.17]
    curves = curves_of_link(rate, delay, ranks, round_s=0.0, call_s=0.0, cpu=(0.0, 0.0))
    found = step_seconds(beat, dense_work(sizes), curves, cores=9, commit=False)
    assert found.seconds == pytest.approx(step_of_rings(ready, sizes, ranks, rate, delay), rel=0.02)


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (8, 2), (8, 4), (16, 4), (16, 8)])
@pytest.mark.parametrize("delay", [0.0, 2e-4])
def test_the_pipeline_agrees_with_every_message_between_nodes(
    ranks: int, per_node: int, delay: float
) -> None:
    rate = 125 * MB
    sizes = [MB, 8 * MB, 8 * MB, 4 * MB]
    beat = Beat(rest=0.05, gaps=(0.06, 0.04, 0.02), tail=0.01)
    ready = [0.05, 0.11, 0.15, 0.17]
    curves = curves_of_link(rate, delay, ranks, per_node, round_s=0.0, call_s=0.0, cpu=(0.0, 0.0))
    found = step_seconds(beat, dense_work(sizes), curves, cores=9, commit=False)
    inside = (INSIDE_RATE, INSIDE_DELAY)
    wanted = step_of_rings(ready, sizes, ranks, rate, delay, per_node, inside)
    assert found.seconds == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 8), (128, 8)])
def test_a_ring_across_nodes_has_the_latency_of_its_own_hops(nodes: int, per_node: int) -> None:
    """Of a ring over all ranks only each g-th hop leaves a node; of one across nodes every hop does."""
    curves = curves_of_link(1e12, 1e-3, nodes * per_node, per_node, round_s=0.0)
    flat, across = (curves.transfer("all_reduce", over, 4096).latency_s for over in ("world", "cross"))
    rounds = 2 * (nodes * per_node - 1)
    assert flat == pytest.approx(rounds * (1e-3 + (per_node - 1) * INSIDE_DELAY) / per_node, rel=1e-3)
    assert across == pytest.approx(2 * (nodes - 1) * 1e-3, rel=2e-3)


def test_a_link_within_a_node_is_another_one() -> None:
    """A transfer inside takes nothing from one to other nodes, and does not count as their link's time."""
    one = Curve(((4096.0, 4096 / (100 * MB)), (1e9, 10.0)))
    curves = Curves(4, dict.fromkeys(PRIMITIVES, one), 2, dict.fromkeys(PRIMITIVES, one))
    within = BucketWork((Phase("all_gather", "node", 20 * MB, 0.0),), 0.0)
    between = BucketWork((Phase("all_gather", "cross", 10 * MB, 0.0),), 0.0)  # twice, for a node
    beat = Beat(rest=1.0, gaps=(0.0,), tail=0.0)
    found = step_seconds(beat, [within, between], curves, cores=9, commit=False)
    assert found.seconds == pytest.approx(1.2, abs=1e-3)
    assert found.network == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 16, 1024])
def test_a_ring_has_two_rounds_of_latency_for_each_other_rank(ranks: int) -> None:
    curves = curves_of_link(1e12, 1e-3, ranks, round_s=0.0)
    assert curves.transfer("all_reduce", "world", 4096).seconds == pytest.approx(
        2 * (ranks - 1) * 1e-3, rel=1e-3
    )
    measured = straight(2e-3, 1e12)  # between 2 ranks
    assert for_ranks(measured, ranks).curve("all_reduce").latency == pytest.approx(
        2e-3 * (ranks - 1), rel=1e-3
    )
    assert for_ranks(measured, ranks).curve("all_gather").latency == pytest.approx(2e-3, rel=1e-3)
    rate = for_ranks(measured, ranks).curve("all_reduce").bytes_per_s
    assert rate == pytest.approx(1e12, rel=1e-3)


def test_the_fluid_shares_fairly() -> None:
    assert fair_shares([0.1, 1.0, 1.0], 1.5) == pytest.approx([0.1, 0.7, 0.7])
    assert fair_shares([0.5, 0.5], 2.0) == [0.5, 0.5]
    fluid = Fluid(cores=1.0)
    fluid.add(Work(left=1.0, cores=1.0))
    fluid.add(Work(left=2.0, cores=1.0))
    assert fluid.run() == pytest.approx(3.0)


def test_beats() -> None:
    beat = even_beat(0.3, [10, 20, 30])
    assert beat.compute == pytest.approx(0.3)
    assert beat.gaps[1] == pytest.approx(3 * (beat.rest - 0.1))
    slow = Beat(3.0, (1.0,), 1.0)
    assert typical_beat([Beat(1.0, (1.0,), 0.0), Beat(2.0, (5.0,), 1.0), slow]) == Beat(2.0, (1.0,), 1.0)
    with pytest.raises(InvalidValue, match=r"\[1, 2\] buckets"):
        typical_beat([Beat(1.0, (), 0.0), slow])
    with pytest.raises(InvalidValue, match="a beat of -1 s"):
        Beat(1.0, (-1.0,), 0.0)


def test_a_beat_of_other_buckets_is_refused() -> None:
    with pytest.raises(InvalidValue, match="2 buckets, the strategy's work 1"):
        seconds(Beat(1.0, (1.0,), 0.0), [gathered(MB)], straight(0.1, 1e9))
    with pytest.raises(InvalidValue, match="cores=0"):
        step_seconds(Beat(1.0, (), 0.0), [gathered(MB)], straight(0.1, 1e9), cores=0, commit=True)


def test_exposed_is_what_is_added_to_compute() -> None:
    found = Forecast(seconds=1.5, compute=1.0, work=0.1, network=0.3, latency=0.0)
    assert math.isclose(found.exposed, 0.5)
