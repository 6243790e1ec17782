"""Settings of a DDP model that cost time or memory."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from ..errors import WrongType
from .finding import Finding, fine

SMALL_MB = 5.0
MANY = 20


def check_ddp(ddp: DistributedDataParallel) -> list[Finding]:
    """The settings of this model that cost time or memory, and what to write instead.

    It changes nothing, and needs no other rank.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise WrongType(
            f"check_ddp needs a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first"
        )
    found = [*_unused(ddp), *_copies(ddp), *_buckets(ddp), *_buffers(ddp)]
    return found or [fine("DDP", "none of its settings costs time or memory")]


def _unused(ddp: DistributedDataParallel) -> list[Finding]:
    if not ddp.find_unused_parameters:
        return []
    if ddp.static_graph:
        what = "find_unused_parameters=True has no effect with static_graph=True, which finds them once"
        return [fine("unused parameters", what)]
    return [
        Finding(
            "unused parameters",
            "costs",
            "find_unused_parameters=True traverses the graph in every forward, and sends which ones are used",
            "leave it out if all are used in every step; static_graph=True if the unused ones never change",
        )
    ]


def _copies(ddp: DistributedDataParallel) -> list[Finding]:
    if ddp.gradient_as_bucket_view:
        return []
    size = _mb(_gradient_bytes(ddp))
    what = f"gradient_as_bucket_view=False: gradients exist twice, {size} more, and are copied twice a step"
    return [
        Finding("gradients", "costs", what, "gradient_as_bucket_view=True, unless you detach_() gradients")
    ]


def _buckets(ddp: DistributedDataParallel) -> list[Finding]:
    cap, total = ddp.bucket_bytes_cap, _gradient_bytes(ddp)
    count = -(-total // cap)
    what = (
        f"bucket_cap_mb={cap / 2**20:g} makes about {count} bucket{'s' if count > 1 else ''} of {_mb(total)}"
    )
    if count > MANY and cap < SMALL_MB * 2**20:
        return [
            Finding(
                "buckets", "costs", f"{what}, each with its own latency", "bucket_cap_mb=25 (the default)"
            )
        ]
    if count == 1 and total > 2**20:
        part = max(1, round(total / 2**20 / 4))
        advice = f"with bucket_cap_mb={part} it starts before backward ends; on a slow link measure it"
        return [Finding("buckets", "note", f"{what}: sending starts only after the last gradient", advice)]
    return []


def _buffers(ddp: DistributedDataParallel) -> list[Finding]:
    option = (
        "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
    )  # torch 2.13
    buffers = list(ddp.module.buffers())
    if not getattr(ddp, option) or not buffers:
        return []
    size = _mb(sum(buffer.numel() * buffer.element_size() for buffer in buffers))
    what = f"{option}=True sends {len(buffers)} buffers, {size}, from rank 0 before every forward"
    return [Finding("buffers", "costs", what, f"{option}=False, if they may differ or never change")]


def _gradient_bytes(ddp: DistributedDataParallel) -> int:
    return sum(p.numel() * p.element_size() for p in ddp.module.parameters() if p.requires_grad)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
