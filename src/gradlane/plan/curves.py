"""How long a collective takes, by its bytes: measured points, and what lies between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..core.collectives import Kind, Scope
from ..core.events import wire_bytes
from ..core.uplink import uplink_bytes
from ..errors import InvalidValue

Primitive = Literal["all_reduce", "all_gather", "all_to_all", "ddp"]
DDPS: Primitive = "ddp"
"""The all-reduce of DDP itself, on torch's own group and without a lane; not every link has this curve."""
RINGS: tuple[Primitive, ...] = ("all_reduce", DDPS)
PRIMITIVES: tuple[Primitive, ...] = ("all_reduce", "all_gather", "all_to_all")
CHUNK = 1 << 20  # bytes of one direct send, as in lane/perform.py
SMALL = 4096  # bytes; an all-reduce of less takes another way through Gloo, and is no measure of latency


@dataclass(frozen=True)
class Curve:
    """Seconds of one collective alone on the link, from its start to its answer, by the bytes on the link.

    Between two points it is a straight line; after the last one, the line through the last two.
    """

    points: tuple[tuple[float, float], ...]
    """Bytes on the link in one direction, and seconds."""
    issue_s: float = 0.0
    """Of one call to the backend, on the thread that starts the collective."""
    cpu_per_request: float = 0.0
    cpu_per_byte: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise InvalidValue(f"a curve needs points of growing sizes, got {sizes}; measure it again")

    def seconds(self, sent: float) -> float:
        points = self.points
        index = bisect_right(points, (sent, 0.0))
        if index == 0 or len(points) == 1:
            return points[0][1]
        (low, fast), (high, slow) = points[index - 1 : index + 1] if index < len(points) else points[-2:]
        return fast + (slow - fast) * (sent - low) / (high - low)

    @property
    def latency(self) -> float:
        """Seconds of a small collective: the part that does not grow with its bytes."""
        return self.seconds(SMALL)

    @property
    def bytes_per_s(self) -> float:
        """What the link carries in a large collective."""
        size, seconds = self.points[-1]
        return (size - SMALL) / max(seconds - self.latency, 1e-9)

    def cpu(self, sent: float) -> float:
        """CPU seconds of one rank, all of its threads."""
        return self.cpu_per_request + self.cpu_per_byte * sent

    def as_dict(self) -> dict[str, Any]:
        return {
            "points": [list(point) for point in self.points],
            "issue_s": self.issue_s,
            "cpu_per_request": self.cpu_per_request,
            "cpu_per_byte": self.cpu_per_byte,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Curve:
        points = tuple((float(size), float(seconds)) for size, seconds in found["points"])
        return cls(points, found["issue_s"], found["cpu_per_request"], found["cpu_per_byte"])


@dataclass(frozen=True)
class Transfer:
    """One collective alone on the link."""

    latency_s: float
    """The part that other collectives do not lengthen."""
    line_s: float
    """The part that shares the link with others."""
    issue_s: float
    """On the thread that starts it."""
    cpu_s: float
    """Of one rank's other threads."""

    @property
    def seconds(self) -> float:
        return self.latency_s + self.line_s


@dataclass(frozen=True)
class Curves:
    """The curves of all primitives between ``world`` ranks.

    ``per_node`` successive ranks share a link to the others, and are joined by the curves ``inside``. A curve
    between nodes counts the bytes that a *node* puts on its link (core/uplink.py): so the ranks behind one
    network card share it.
    """

    world: int
    by_primitive: Mapping[Primitive, Curve]
    per_node: int = 1
    inside: Mapping[Primitive, Curve] = field(default_factory=dict)
    narrow_s: Mapping[str, float] = field(default_factory=dict)
    """By dtype: seconds that each byte of an all-reduce takes longer than one of fp32."""

    def curve(self, kind: Kind, over: Scope = "world") -> Curve:
        primitive: Primitive = "all_to_all" if kind == "reduce_scatter" else kind
        known = self.inside if over == "node" else self.by_primitive
        if primitive not in known:
            within = "within a node" if over == "node" else "between ranks"
            raise InvalidValue(
                f"there is no curve of {primitive} {within}; measure it, or plan with ranks per node"
            )
        return known[primitive]

    @property
    def bytes_per_s(self) -> float:
        """What the link carries: an all-reduce may reach less, because it waits for its delay."""
        return max(curve.bytes_per_s for curve in self.by_primitive.values())

    @property
    def of_ddp(self) -> Curves:
        """Of steps without a lane."""
        if DDPS not in self.by_primitive:
            return self
        return replace(self, by_primitive={**self.by_primitive, "all_reduce": self.by_primitive[DDPS]})

    def size(self, over: Scope) -> int:
        """How many ranks a scope has."""
        return {"world": self.world, "node": self.per_node, "cross": self.world // self.per_node}[over]

    def link_bytes(self, kind: Kind, over: Scope, payload_bytes: int) -> int:
        """What a collective puts on the link of one node; within a node, what one rank sends."""
        sent = wire_bytes(kind, payload_bytes, self.size(over))
        if over == "node" or self.per_node == 1:
            return sent
        return uplink_bytes(sent, over, self.world, self.per_node, ring=kind == "all_reduce")

    def transfer(self, kind: Kind, over: Scope, payload_bytes: int, dtype: str = "float32") -> Transfer:
        size = self.size(over)
        if size == 1:
            return Transfer(0.0, 0.0, 0.0, 0.0)
        curve = self.curve(kind, over)
        on_link = self.link_bytes(kind, over, payload_bytes)
        seconds = curve.seconds(on_link)
        latency = min(seconds, curve.latency)
        line = seconds - latency
        if over == "cross" and kind == "all_reduce":  # a ring of one rank for each node
            latency = 2 * (size - 1) * self._hop(latency)
        sent = wire_bytes(kind, payload_bytes, size)
        adding = self.narrow_s.get(dtype, 0.0) * sent if kind == "all_reduce" else 0.0
        return Transfer(
            latency, line + adding, curve.issue_s * calls(kind, sent, size), curve.cpu(sent) + adding
        )

    def _hop(self, latency: float) -> float:
        """Of the rounds of a ring over all ranks, which has this latency, the one that leaves a node."""
        within = 0.0
        if "all_reduce" in self.inside:
            within = self.inside["all_reduce"].latency / 2  # of all but one of a node's ranks
        return max(self.per_node * latency / (2 * (self.world - 1)) - within, 0.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "per_node": self.per_node,
            "by_primitive": {name: curve.as_dict() for name, curve in self.by_primitive.items()},
            "inside": {name: curve.as_dict() for name, curve in self.inside.items()},
            "narrow_s": dict(self.narrow_s),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Curves:
        def curves(part: Mapping[str, Any]) -> dict[Any, Curve]:
            return {name: Curve.from_dict(curve) for name, curve in part.items()}

        between, inside = curves(found["by_primitive"]), curves(found["inside"])
        return cls(found["world"], between, found["per_node"], inside, found["narrow_s"])


def calls(kind: Kind, sent: int, size: int) -> int:
    """Calls to the backend that start one collective: direct exchanges send and receive piece by piece."""
    if kind == "all_reduce":
        return 1
    message = -(-sent // max(size - 1, 1))
    return 2 * (size - 1) * max(1, -(-message // CHUNK))
