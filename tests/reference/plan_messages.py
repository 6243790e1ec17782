"""Steps message by message: every message of every ring, on links that carry one message at a time.

The planner looks at one rank and at fluids. This looks at all ranks, and at each message from its first byte
to its last. It is slow, and has no idea of the planner's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import count
from math import inf

SEGMENT = 1 << 20
IN_FLIGHT = 2
RINGS = 2


def segments_of(payload: int, ranks: int) -> int:
    """As Gloo cuts an all-reduce: at most 1 MiB each, two for each rank at least, as many for each rank."""
    wanted = max(-(-payload // SEGMENT), 2 * ranks)
    return -(-wanted // ranks) * ranks


class Ring:
    """One all-reduce: segment s starts at rank s % n, and makes 2(n - 1) hops, from rank to rank."""

    def __init__(self, payload: int, ranks: int) -> None:
        self.ranks = ranks
        self.size = payload / segments_of(payload, ranks)
        self.to_send: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]  # (segment, hop)
        for segment in range(segments_of(payload, ranks)):
            self.to_send[segment % ranks].append((segment, 0))
        self.left = segments_of(payload, ranks) * 2 * (ranks - 1)  # messages
        self.in_flight = [0] * ranks


def step_of_rings(
    ready: Sequence[float],
    payloads: Sequence[int],
    ranks: int,
    bytes_per_s: float,
    delay: float,
    per_node: int = 1,
    inside: tuple[float, float] = (inf, 0.0),
) -> float:
    """When the last of these all-reduces ends, each of which may start at its time; two run at a time.

    Each rank has a link to the next one; between ranks of a node it has the rate and the delay ``inside``.
    A link serves the rings that have something to send in turn. A message is there a delay after its last
    byte has left; until then it is in flight, and no third one of its ring leaves the rank.
    """
    rings = [Ring(payload, ranks) for payload in payloads]
    started, ended = [False] * len(rings), [0.0] * len(rings)
    busy = [False] * ranks
    turn = [0] * ranks
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    serial = count()

    def at(time: float, what: str, *about: int) -> None:
        heapq.heappush(events, (time, next(serial), what, about))

    def send(now: float, rank: int) -> None:
        if busy[rank]:
            return
        for offset in range(len(rings)):
            index = (turn[rank] + offset) % len(rings)
            ring = rings[index]
            if started[index] and ring.to_send[rank] and ring.in_flight[rank] < IN_FLIGHT:
                segment, hop = ring.to_send[rank].popleft()
                ring.in_flight[rank] += 1
                busy[rank] = True
                turn[rank] = index + 1
                rate, late = (bytes_per_s, delay) if (rank + 1) % per_node == 0 else inside
                gone = now + ring.size / rate
                at(gone, "gone", rank)
                at(gone + late, "there", index, rank, segment, hop)
                return

    def start(now: float) -> None:
        running = sum(begun and ring.left > 0 for begun, ring in zip(started, rings, strict=True))
        for index in range(len(rings)):
            if not started[index] and ready[index] <= now and running < RINGS:
                started[index] = True
                running += 1
                for rank in range(ranks):
                    send(now, rank)

    for time in ready:
        at(time, "ready")
    while events:
        now, _, what, about = heapq.heappop(events)
        if what == "ready":
            start(now)
        elif what == "gone":
            busy[about[0]] = False
            send(now, about[0])
        else:
            index, rank, segment, hop = about
            ring = rings[index]
            ring.in_flight[rank] -= 1
            ring.left -= 1
            peer = (rank + 1) % ranks
            if hop + 1 < 2 * (ranks - 1):
                ring.to_send[peer].append((segment, hop + 1))
            if ring.left == 0:
                ended[index] = now
                start(now)
            send(now, peer)
            send(now, rank)
    return max(ended)
