"""The figures of a plan from what is known of a job: nothing runs but the strategies' own work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.bucket import Slot
from ..core.scopes import scopes_of
from ..errors import InvalidValue
from ..plan.beat import even_beat
from ..plan.ddp_buckets import ddp_buckets
from ..plan.echo import work_of
from ..plan.forecast import ddp_forecast, is_off
from ..plan.scale import check_ranks, curves_of_link
from ..simulate.buckets import nodes_of
from ..strategies.auto.ladder import ladder
from .link import Link
from .plan_figures import PlanFigures

WIDTH = 1024
CORES = 4.0  # of one rank: enough that compute, lane and network do not wait for each other
MOST = 65_536  # ranks
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Job:
    """A training job as one knows it before it runs."""

    slots: Sequence[Slot]
    compute: float
    """Seconds of forward and backward of one step."""
    ranks: int
    per_node: int
    link: Link
    delay: float
    """Seconds of the link, in one direction."""
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        if not self.compute > 0:
            raise InvalidValue(f"compute={self.compute:g} s is not above 0; give the time of one step")
        if not 2 <= self.ranks <= MOST:
            raise InvalidValue(f"ranks={self.ranks} cannot be planned; use 2 to {MOST:,}")
        check_ranks(self.ranks, self.per_node)
        if self.link.rate_bits is None:
            raise InvalidValue("an unshaped link has no rate to plan with; add --link 10gbit, or measure it")


def given_figures(job: Job, strategies: Sequence[str] | None = None) -> PlanFigures:
    """``strategies``: None is the ladder, with that across nodes where nodes have several ranks."""
    rate = job.link.payload_bytes_per_s
    assert rate is not None
    cap = None if job.bucket_mb is None else round(job.bucket_mb * 2**20)
    layouts = ddp_buckets(job.slots, 4, cap)
    sizes = [4 * sum(slot.numel for slot in layout) for layout in layouts]
    curves = curves_of_link(rate, job.delay, job.ranks, job.per_node)
    beat = even_beat(job.compute, sizes)
    figures = PlanFigures(curves, beat, tuple(layouts), 4, CORES)
    if is_off(ddp_forecast(beat, sizes, curves, CORES)):
        return figures
    torch.set_num_threads(1)
    scopes = scopes_of(0, nodes_of(job.ranks, job.per_node))
    works = {text: work_of(text, layouts, scopes) for text in strategies or ladder(job.per_node)}
    return PlanFigures(curves, beat, tuple(layouts), 4, CORES, works)


def slots_for(parameters: int) -> list[Slot]:
    """Of a model of which only the size is known: square matrices."""
    matrices, remainder = divmod(parameters, WIDTH * WIDTH)
    slots = [Slot(f"layer{index}", torch.Size([WIDTH, WIDTH])) for index in range(matrices)]
    return slots + ([Slot("remainder", torch.Size([remainder]))] if remainder else [])


def parse_seconds(text: str) -> float:
    """``180ms``, ``1.2s``, ``50us``."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(us|ms|s)", text.strip().lower())
    if match is None:
        raise InvalidValue(f"{text!r} is not a time; write a number with its unit, as 180ms or 1.2s")
    return float(match[1]) * SECONDS[match[2]]
