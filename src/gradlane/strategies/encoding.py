"""Encoding into a bucket's own buffers, and decoding what all ranks sent into one gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, check_rule, combine_into
from ..aggregate.mean import mean
from ..aggregate.rule import Rule
from ..codecs.base import Codec
from ..core.bucket import Bucket, Feedback
from ..core.collectives import Payload
from ..core.message import message_size, payload_in
from ..core.streams import has_streams

SALT = 0x5EED  # of the seeds; a second encoding has the next
Sent = Callable[[], Tensor]


def encoded(
    codec: Codec, bucket: Bucket, flat: Tensor, feedback: Feedback | None, seed: int, use: str
) -> Payload:
    """The payload C(p) of p = flat + residual, and residual_out = p - C(p); without feedback C(flat)."""
    out = payload_buffer(codec, bucket, flat.numel(), use)
    if feedback is None or feedback.residual is None:
        return codec.encode(flat, seed, out)
    return codec.encode_with_feedback(flat, feedback.residual, seed, out, feedback.residual_out)


def payload_buffer(codec: Codec, bucket: Bucket, numel: int, use: str) -> Payload:
    """An uninitialised payload whose parts lie side by side, as they will be sent."""
    layout = codec.layout(numel)
    return payload_in(bucket.empty(use, message_size(layout), torch.uint8), layout)


def decoded(
    codec: Codec,
    aggregate: Aggregate,
    bucket: Bucket,
    payloads: Sequence[Payload],
    seeds: Sequence[int],
    out: Tensor,
) -> Tensor:
    """All payloads as one gradient. They are added in rank order, so that all ranks get the same bits."""
    if aggregate is mean:
        total = out if out.dtype == torch.float32 else bucket.empty("wide sum", out.numel(), torch.float32)
        codec.decode_sum(payloads, total, seeds, 1 / bucket.divisor())
        return out if total is out else out.copy_(total)
    rows = rows_buffer(bucket, out.numel())
    for row, payload, seed in zip(rows, payloads, seeds, strict=True):
        codec.decode(payload, row, seed)
    combine_rows(aggregate, bucket, rows, out)
    return out


def rows_buffer(bucket: Bucket, numel: int) -> Tensor:
    """fp32 [world, numel], uninitialised."""
    return bucket.empty("rows", bucket.world * numel, torch.float32).view(bucket.world, numel)


def combine_rows(aggregate: Aggregate, bucket: Bucket, rows: Tensor, out: Tensor) -> None:
    """Write what an aggregate makes of the ranks' rows into ``out``."""
    check_rule(aggregate, bucket.world)
    if not rows.numel() or out.is_meta:  # a dry run knows the shapes without a call
        return
    undefined = _columns_with_nan(rows) if isinstance(aggregate, Rule) else None
    combine_into(aggregate, rows, out)
    if undefined is not None:
        out.masked_fill_(undefined, torch.nan)


def _columns_with_nan(rows: Tensor) -> Tensor | None:
    """NaN has no position in an order, so a rule might answer anything there. None: there is no NaN."""
    if not has_streams(rows.device) and not rows.sum().isnan():
        return None
    return rows.isnan().any(0)


def copies_if_wanted(
    bucket: Bucket, payloads: Sequence[Payload], seed: int
) -> list[tuple[Payload, int]] | None:
    """Copies of payloads with their seeds, where a wrapper wants ``sent``: the wire may overwrite them."""
    if not bucket.wants_sent:
        return None
    return [(tuple(part.clone() for part in payload), seed + n) for n, payload in enumerate(payloads)]


def sent_of(codec: Codec, flat: Tensor, copies: Sequence[tuple[Payload, int]] | None) -> Sent | None:
    """This rank's contribution as the others saw it, decoded when somebody calls for it."""
    if copies is None:
        return None
    ((payload, seed),) = copies
    return lambda: codec.decode(payload, torch.empty_like(flat), seed)
