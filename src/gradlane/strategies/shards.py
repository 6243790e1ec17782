"""A bucket in shards: each rank combines one of them, and encodes the result for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate
from ..aggregate.mean import mean
from ..codecs.base import Codec, keep_finite
from ..codecs.raw import Raw
from ..core.bucket import Bucket, Feedback
from ..core.collectives import Payload
from ..core.strategy import Reduced
from .encoding import SALT, Sent, combine_rows, copies_if_wanted, encoded, payload_buffer, rows_buffer

T = TypeVar("T")


class Shards:
    """A bucket in one shard for each rank, which combines what all ranks sent it of that shard.

    A rank's own shard is not sent, so it is not encoded and loses nothing. In that part of the residual the
    rank keeps what the encoding of the *answer* loses: one memory of the size of the gradient holds what
    both encodings lose. It has the unit of the others' residuals, a sum over the ranks, so it may move to
    another shard, or to a world of another size, and count as much there.
    """

    def __init__(
        self, codec: Codec, bucket: Bucket, answer: Codec | None = None, size: int | None = None
    ) -> None:
        self._codec, self._bucket = codec, bucket
        self._answer = answer or codec
        self._seed = bucket.seed(SALT, shared=False)
        self._copies: list[tuple[Payload, int]] | None = None
        self._own_sent: Tensor | None = None
        self._bounded = False
        granularity = math.lcm(codec.granularity, self._answer.granularity)
        self.size = shard_size(bucket.flat.numel(), bucket.world, granularity) if size is None else size
        """Elements of a shard on the wire: those of the longest."""
        self._parts = _cut(bucket.flat, self.size, bucket.world)
        self._own = self._parts[bucket.rank]
        self.filled = self._own.numel()
        """Elements of this rank's own shard; the last shards may be shorter, or empty."""

    def encoded(self) -> list[Payload]:
        """What goes to each rank; to itself an uninitialised payload of the same shape."""
        bucket = self._bucket
        payloads = [
            payload_buffer(self._codec, bucket, part.numel(), "own shard")
            if rank == bucket.rank
            else encoded(self._codec, bucket, part, feedback, self._seed + rank, f"shard {rank}")
            for rank, (part, feedback) in enumerate(zip(self._parts, self._feedback(), strict=True))
        ]
        self._copies = copies_if_wanted(bucket, payloads, self._seed)
        return payloads

    def _feedback(self) -> Sequence[Feedback]:
        """The residuals of each shard."""
        world, feedback = self._bucket.world, self._bucket.feedback
        if feedback is None or feedback.residual is None or feedback.residual_out is None:
            return [Feedback()] * world
        before, after = (_cut(flat, self.size, world) for flat in (feedback.residual, feedback.residual_out))
        return list(map(Feedback, before, after))

    def _own_feedback(self) -> Feedback:
        """The residual of this rank's own shard."""
        feedback = self._bucket.feedback
        if feedback is None or feedback.residual is None or feedback.residual_out is None:
            return Feedback()
        own = slice(self._bucket.rank * self.size, self._bucket.rank * self.size + self.filled)
        return Feedback(feedback.residual[own], feedback.residual_out[own])

    def combined(self, received: Sequence[Payload], aggregate: Aggregate) -> Tensor:
        """This rank's shard of the answer, padded to the size of a shard."""
        bucket, total = self._bucket, self.answer_buffer(self._wide())
        filled = total[: self.filled]
        if aggregate is mean:
            share = 1 / bucket.divisor()
            payloads, seeds = self._of_others(received), self._of_others(self._seeds())
            self._codec.decode_sum(payloads, filled, seeds, share)
            filled.add_(self._own, alpha=share)
        else:
            combine_rows(aggregate, bucket, self.rows(received), filled)
        return total

    def rows(self, received: Sequence[Payload]) -> Tensor:
        """What each rank gave of this rank's shard, fp32 [world, filled]."""
        rows = rows_buffer(self._bucket, self.filled)
        for rank, (row, payload, seed) in enumerate(zip(rows, received, self._seeds(), strict=True)):
            if rank != self._bucket.rank:
                self._codec.decode(payload, row, seed)
            elif isinstance(self._codec, Raw):
                row.copy_(self._own)
            else:  # a codec makes NaN of an infinite value; the own row must show aggregates the same
                torch.mul(self._own, 0.0, out=row).add_(self._own)
        return rows

    def _seeds(self) -> list[int]:
        """The seeds with which the ranks encoded what they sent to this one."""
        bucket = self._bucket
        return [bucket.seed(SALT, shared=False, rank=rank) + bucket.rank for rank in range(bucket.world)]

    def _of_others(self, everyone: Sequence[T]) -> list[T]:
        return [one for rank, one in enumerate(everyone) if rank != self._bucket.rank]

    def answer_buffer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """For this rank's shard of the answer: zeros beyond what is filled."""
        total = self._bucket.empty("shard sum", self.size, dtype)
        total[self.filled :].zero_()
        return total

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._bucket.flat.dtype, torch.float32)

    def answer(self, total: Tensor) -> Payload:
        """This rank's shard of the answer, plus the residual of earlier answers, encoded for all."""
        bucket = self._bucket
        seed = bucket.seed(SALT + 1, shared=False)
        if bucket.feedback is None:
            payload = encoded(self._answer, bucket, total, None, seed, "shard mean")
        else:
            payload = self._answer_with_feedback(total, seed)
        self._bounded = self._answer.bounded(payload)
        return payload

    def _answer_with_feedback(self, total: Tensor, seed: int) -> Payload:
        bucket, count = self._bucket, self._bucket.divisor()
        own = self._own_feedback()
        residual = bucket.empty("shard residual", self.size, self._wide())
        filled = residual[: self.filled]
        residual[self.filled :].zero_()
        if own.residual is None:
            filled.zero_()
        else:  # it is of a sum, and total is a mean
            torch.mul(own.residual.to(filled.dtype), 1 / count, out=filled)
        if bucket.wants_sent:
            self._own_sent = torch.add(self._own, filled, alpha=count)
        payload = encoded(self._answer, bucket, total, Feedback(residual, residual), seed, "shard mean")
        if own.residual_out is not None:
            torch.mul(filled, count, out=own.residual_out)
            if not own.residual_out.is_meta:
                keep_finite(own.residual_out)
        if self._own_sent is not None:
            self._own_sent.sub_(filled.mul_(count))
        return payload

    def reduced(self, everyone: Sequence[Payload]) -> Reduced:
        """Decode all shards of the answer into the bucket. Each rank has checked its own for ``bounded``."""
        bucket = self._bucket
        for rank, (part, payload) in enumerate(zip(self._parts, everyone, strict=True)):
            self._decode_answer(payload, part, bucket.seed(SALT + 1, shared=False, rank=rank))
        return Reduced(bucket.flat, self._sent(), self._bounded)

    def _decode_answer(self, payload: Payload, part: Tensor, seed: int) -> None:
        if part.numel() == self.size:
            self._answer.decode(payload, part, seed)
        else:
            padded = self._bucket.empty("shard sum", self.size, self._wide())
            part.copy_(self._answer.decode(payload, padded, seed)[: part.numel()])

    def _sent(self) -> Sent | None:
        copies, own = self._copies, self._own_sent
        if copies is None or own is None:
            return None
        flat, own_rank, codec, size = self._bucket.flat, self._bucket.rank, self._codec, self.size

        def sent() -> Tensor:
            out = torch.empty_like(flat)
            for rank, part in enumerate(_cut(out, size, len(copies))):
                part.copy_(own) if rank == own_rank else codec.decode(copies[rank][0], part, copies[rank][1])
            return out

        return sent


def shard_size(numel: int, world: int, granularity: int) -> int:
    """Elements of a shard: equal parts, rounded up to whole blocks."""
    part = -(-numel // world)
    return -(-part // granularity) * granularity


def _cut(flat: Tensor, size: int, world: int) -> list[Tensor]:
    parts = list(torch.split(flat, size)) if size else []
    return parts + [flat[:0]] * (world - len(parts))
