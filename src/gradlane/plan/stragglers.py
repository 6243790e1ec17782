"""Steps of many ranks that do not compute equally fast: a collective starts when its last member has come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .beat import Beat
from .curves import Curves
from .pipeline import COMMIT_BYTES, RINGS
from .work import BucketWork

STEPS = 200
Times = NDArray[np.float64]


def straggling_steps(
    beat: Beat,
    buckets: Sequence[BucketWork],
    curves: Curves,
    spread: float,
    *,
    commit: bool,
    steps: int = STEPS,
    seed: int = 0,
) -> Times:
    """Seconds of each of ``steps`` steps.

    The compute of every rank in every step is multiplied by a lognormal factor with mean 1, whose logarithm
    has the standard deviation ``spread``. Cores are not limited here; requests wait for one another.
    """
    draw = np.random.default_rng(seed)
    world, nodes = curves.world, curves.world // curves.per_node
    factors = np.exp(draw.normal(-(spread**2) / 2, spread, size=(steps, nodes, curves.per_node)))
    clock = np.zeros((steps, nodes, curves.per_node))  # of each rank's compute thread
    line = np.zeros((steps, 1, 1))  # when the link is free
    lane = np.zeros((steps, 1, 1))
    rings = [np.zeros((steps, 1, 1))] * RINGS  # when the last all-reduces ended
    for bucket, pause in zip(buckets, (beat.rest, *beat.gaps), strict=True):
        clock = clock + pause * factors
        at: Times = clock
        for number, phase in enumerate(bucket.phases):
            transfer = curves.transfer(phase.kind, phase.over, phase.payload_bytes, phase.dtype)
            busy = phase.encode_s + transfer.issue_s
            if number == 0:
                clock = clock + busy
                at = clock
            else:
                at = np.maximum(at, lane) + busy
            at = _last_member(at, phase.over)
            if phase.over == "node":
                at = at + transfer.seconds
            else:
                begin = _last_member(at, "world")
                if phase.kind == "all_reduce":
                    begin = np.maximum(begin, rings[-RINGS])
                line = np.maximum(begin + transfer.latency_s, line) + transfer.line_s
                if phase.kind == "all_reduce":
                    rings.append(line)
                at = np.broadcast_to(line, clock.shape)
        lane = np.maximum(lane, _last_member(at, "world")) + bucket.decode_s
    end = np.maximum(_last_member(clock + beat.tail * factors, "world"), lane)
    if commit and world > 1:
        end = end + curves.transfer("all_reduce", "world", COMMIT_BYTES).seconds
    return end.reshape(steps)


def _last_member(at: Times, over: str) -> Times:
    """When the last member of each rank's group is there."""
    axis = (1, 2) if over == "world" else 2 if over == "node" else 1
    last: Times = np.max(at, axis=axis, keepdims=True)
    return last
