"""The buckets that DDP makes of a model, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.bucket import Layout, Slot

FIRST_BYTES = 1 << 20
CAP_BYTES = 25 << 20


def ddp_buckets(slots: Sequence[Slot], itemsize: int, cap_bytes: int | None = None) -> list[Layout]:
    """Parameters from the last to the first, as backward computes them. A bucket is closed when it has
    reached its limit, so it may exceed it; the limit of the first one is smaller."""
    buckets: list[list[Slot]] = [[]]
    filled = 0
    for slot in reversed(slots):
        limit = cap_bytes or (CAP_BYTES if len(buckets) > 1 else FIRST_BYTES)
        if filled >= limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(slot)
        filled += slot.numel * itemsize
    return [Layout(bucket) for bucket in buckets if bucket]
