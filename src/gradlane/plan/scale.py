"""Curves for another link or another number of ranks, from measured ones or from figures alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.uplink import uplink_bytes
from ..errors import InvalidValue
from .curves import RINGS, Curve, Curves, Primitive

SEGMENT = 1 << 20  # bytes; Gloo cuts an all-reduce into segments of this size at most, two of them in flight
WAIT = 0.75  # of a delay: what each further segment waits, because no third one is in flight
ROUND_S = 60e-6  # of a small message through Gloo, on an idle machine: what is not the link's delay
CALL_S = 30e-6  # of one send or receive from Python
CPU_PER_REQUEST, CPU_PER_BYTE = 5e-4, 4e-10
INSIDE_RATE, INSIDE_DELAY = 50e9, 5e-6  # bytes per second and seconds between the ranks of a node
SIZES = (24, *(4096 * 4**power for power in range(10)))  # bytes on the link


def at_rate(curves: Curves, bytes_per_s: float) -> Curves:
    """The same ranks with another link; latency and CPU stay as they are.

    On a slower link each byte takes a time more. On a faster one the time of the bytes shrinks in proportion,
    and with it what a collective loses against the link; only a ring's waits for a delay remain.
    """
    if bytes_per_s <= curves.bytes_per_s:
        more = 1 / bytes_per_s - 1 / curves.bytes_per_s  # seconds for each byte
        changed = {name: _slower(curve, more) for name, curve in curves.by_primitive.items()}
    else:
        changed = {name: _faster(curves, name, bytes_per_s) for name in curves.by_primitive}
    return replace(curves, by_primitive=changed)


def _slower(curve: Curve, more: float) -> Curve:
    return replace(curve, points=tuple((size, seconds + size * more) for size, seconds in curve.points))


def _faster(curves: Curves, name: Primitive, bytes_per_s: float) -> Curve:
    curve, factor = curves.by_primitive[name], curves.bytes_per_s / bytes_per_s
    wait = WAIT * curve.latency / (2 * max(curves.world - 1, 1)) if name in RINGS else 0.0
    # A slow link wakes its threads more often for each byte than a fast one.
    cpu_per_byte = min(curve.cpu_per_byte, CPU_PER_BYTE)
    points = []
    for size, seconds in curve.points:
        latency = min(seconds, curve.latency)
        lost = max(seconds - latency - size / curves.bytes_per_s, 0.0)
        stays = latency + min(lost, wait * further_messages(size, curves.world))
        points.append((size, stays + factor * (seconds - stays)))
    return replace(curve, points=_growing(points), cpu_per_byte=cpu_per_byte)


def of_nodes(curves: Curves, per_node: int, inside: Mapping[Primitive, Curve] | None = None) -> Curves:
    """Curves that count the bytes of a rank, as those of nodes: by the bytes that a node puts on its link."""

    def by_node(name: Primitive, curve: Curve) -> Curve:
        ring = name in RINGS
        points = (
            (float(uplink_bytes(round(sent), "world", curves.world, per_node, ring=ring)), seconds)
            for sent, seconds in curve.points
        )
        return replace(curve, points=tuple(points))

    changed = {name: by_node(name, curve) for name, curve in curves.by_primitive.items()}
    return replace(curves, per_node=per_node, by_primitive=changed, inside=inside or {})


def with_latency(curves: Curves, factor: float) -> Curves:
    """The same link with another latency."""
    changed = {name: _with_latency(curve, factor) for name, curve in curves.by_primitive.items()}
    return replace(curves, by_primitive=changed)


def _with_latency(curve: Curve, factor: float) -> Curve:
    more = (factor - 1) * curve.latency
    points = [(size, max(seconds + more, seconds * min(factor, 1.0))) for size, seconds in curve.points]
    return replace(curve, points=_growing(points))


def for_ranks(curves: Curves, world: int, per_node: int | None = None) -> Curves:
    """For another number of ranks. A ring has 2(n - 1) rounds: its latency grows with n - 1, its rate stays.
    A direct exchange is one round with any n; its calls to the backend grow with n."""
    per_node = curves.per_node if per_node is None else per_node
    check_ranks(world, per_node)
    if curves.world < 2:
        raise InvalidValue("curves of one rank say nothing of a link; measure between two ranks or more")
    rounds = (world - 1) / (curves.world - 1)
    changed = {
        name: _with_latency(curve, rounds) if name in RINGS else curve
        for name, curve in curves.by_primitive.items()
    }
    return replace(curves, world=world, per_node=per_node, by_primitive=changed)


def curves_of_link(
    bytes_per_s: float,
    delay: float,
    world: int,
    per_node: int = 1,
    *,
    round_s: float = ROUND_S,
    call_s: float = CALL_S,
    cpu: tuple[float, float] = (CPU_PER_REQUEST, CPU_PER_BYTE),
) -> Curves:
    """Curves of a link of which only rate and delay are known."""
    check_ranks(world, per_node)
    if not bytes_per_s > 0 or not delay >= 0:
        raise InvalidValue(
            f"a link of {bytes_per_s:g} bytes/s and {delay:g} s does not exist; use a rate above 0"
        )
    inside: Mapping[Primitive, Curve] = {}
    hop = delay
    if per_node > 1:
        inside = _curves(INSIDE_RATE, INSIDE_DELAY, INSIDE_DELAY, per_node, round_s, call_s, cpu)
        hop = (delay + (per_node - 1) * INSIDE_DELAY) / per_node  # a ring leaves a node once
    between = _curves(bytes_per_s, delay, hop, world, round_s, call_s, cpu)
    return Curves(world, between, per_node, inside)


def _curves(
    bytes_per_s: float, delay: float, hop: float, ranks: int, round_s: float, call_s: float,
    cpu: tuple[float, float],
) -> dict[Primitive, Curve]:  # fmt: skip
    ring = Curve(
        tuple((size, ring_seconds(size, bytes_per_s, delay, ranks, round_s, hop)) for size in SIZES),
        call_s,
        *cpu,
    )
    direct = Curve(tuple((size, delay + round_s + size / bytes_per_s) for size in SIZES), call_s, *cpu)
    return {"all_reduce": ring, "all_gather": direct, "all_to_all": direct}


def ring_seconds(
    sent: float,
    bytes_per_s: float,
    delay: float,
    ranks: int,
    round_s: float = 0.0,
    hop: float | None = None,
) -> float:
    """Gloo's all-reduce: a ring of segments, two of them in flight.

    It has 2(n - 1) rounds of latency, ``hop`` on average: the delay, unless some ranks share a node. Where
    there are more segments than two for each rank, each further one waits for a part of the delay.
    """
    if ranks == 1:
        return 0.0
    rounds = 2 * (ranks - 1) * ((delay if hop is None else hop) + round_s)
    return rounds + WAIT * delay * further_messages(sent, ranks) + sent / bytes_per_s


def further_messages(sent: float, ranks: int) -> float:
    """Messages of one rank in an all-reduce beyond those of two segments for each rank."""
    payload = sent * ranks / (2 * max(ranks - 1, 1))
    segments = max(-(-int(payload) // SEGMENT), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    return 2 * segments * (ranks - 1) / ranks - 4 * (ranks - 1)


def check_ranks(world: int, per_node: int) -> None:
    if world < 1 or per_node < 1 or world % per_node:
        raise InvalidValue(
            f"{world} ranks are not nodes of {per_node}; use a number of ranks that it divides"
        )


def _growing(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    grown, most = [], 0.0
    for size, seconds in points:
        most = max(most, seconds)
        grown.append((size, most))
    return tuple(grown)
