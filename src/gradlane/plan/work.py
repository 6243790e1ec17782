"""What a strategy does with one bucket: its requests, and its own work before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.collectives import Kind, Scope
from ..core.events import wire_bytes


@dataclass(frozen=True)
class Phase:
    """One request of a strategy, and its work before that."""

    kind: Kind
    over: Scope
    payload_bytes: int
    """What one rank gives to the collective, as in ``Event.payload_bytes``."""
    encode_s: float
    """The strategy's own work up to the request, on one thread."""
    after_all: bool = False
    """It waits for a ``step_sum``, thus for the step's last bucket, before that work."""
    dtype: str = "float32"
    """Of what is sent: Gloo adds narrow numbers more slowly."""

    def sent_bytes(self, size: int) -> int:
        """What one of ``size`` ranks sends."""
        return wire_bytes(self.kind, self.payload_bytes, size)


@dataclass(frozen=True)
class BucketWork:
    phases: tuple[Phase, ...]
    decode_s: float
    """The strategy's own work after its last answer."""
    dense_bytes: int = 0
    """Bytes of the gradient itself."""

    @property
    def own_s(self) -> float:
        """All of the strategy's own work."""
        return sum(phase.encode_s for phase in self.phases) + self.decode_s


def dense_work(bucket_bytes: Sequence[int]) -> tuple[BucketWork, ...]:
    """Of DDP without a hook: one all-reduce for each bucket."""
    return tuple(BucketWork((Phase("all_reduce", "world", size, 0.0),), 0.0, size) for size in bucket_bytes)
