"""The works of several strategies: as notes between ranks, and of the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .work import BucketWork, Phase

Works = Mapping[str, Sequence[BucketWork]]
"""The work on each bucket, by strategy."""


def works_as_dict(works: Works) -> dict[str, Any]:
    return {text: [asdict(bucket) for bucket in buckets] for text, buckets in works.items()}


def works_from(found: Mapping[str, Any]) -> dict[str, tuple[BucketWork, ...]]:
    return {text: tuple(_bucket(bucket) for bucket in buckets) for text, buckets in found.items()}


def _bucket(found: Mapping[str, Any]) -> BucketWork:
    phases = tuple(Phase(**phase) for phase in found["phases"])
    return BucketWork(phases, found["decode_s"], found["dense_bytes"])


def slowest_works(of_ranks: Sequence[Works]) -> dict[str, Sequence[BucketWork]]:
    """For each strategy, the work of the rank that takes longest."""
    return {
        text: max((works[text] for works in of_ranks), key=lambda works: sum(work.own_s for work in works))
        for text in of_ranks[0]
    }
