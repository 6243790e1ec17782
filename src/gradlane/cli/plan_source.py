"""Where the figures of a plan come from: what is known of a job, a job, or ranks on this machine."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from ..bench.link import parse_link
from ..bench.plan_figures import PlanFigures
from ..bench.plan_given import Job, given_figures, parse_seconds, slots_for
from ..bench.plan_local import measure_locally
from ..bench.plan_rank import Task, measure_plan
from ..bench.workload import workload
from ..core.bucket import Slot
from ..doctor.estimates import parse_count
from ..doctor.job import in_a_job
from ..errors import InvalidValue
from ..simulate.buckets import slots_of
from ..strategies.text import parse

FASTEST = 1e12  # bits per second, where a link is only thought of
DELAY = "50us"
MODEL = "mlp9m"


@dataclass(frozen=True)
class Source:
    figures: PlanFigures
    rank: int = 0
    """Of this process."""
    note: str = ""
    """On the link, if it is not the one that was asked for."""


def find_figures(options: argparse.Namespace) -> Source:
    for text in options.strategy or ():
        parse(text)  # a message on a misspelled name comes before any measurement
    if options.bucket_mb is not None and not options.bucket_mb > 0:
        raise InvalidValue(f"--bucket-mb {options.bucket_mb:g} holds nothing; use a number above 0, say 25")
    if options.compute:
        return _given(options)
    _refuse_what_is_for_figures(options)
    return _in_job(options) if in_a_job() else _here(options)


def _given(options: argparse.Namespace) -> Source:
    if options.parameters and options.model:
        raise InvalidValue(
            f"--parameters {options.parameters} and --model {options.model} are two models; leave one out"
        )
    job = Job(
        _slots(options),
        parse_seconds(options.compute),
        2 if options.ranks is None else options.ranks,
        1 if options.per_node is None else options.per_node,
        parse_link(options.link or "none", FASTEST),
        parse_seconds(options.delay or DELAY),
        options.bucket_mb,
    )
    rank = int(os.environ.get("RANK", 0)) if in_a_job() else 0
    return Source(given_figures(job, options.strategy), rank)


def _slots(options: argparse.Namespace) -> list[Slot]:
    if options.parameters:
        return slots_for(parse_count(options.parameters))
    return list(slots_of(workload(options.model or MODEL).model))


def _refuse_what_is_for_figures(options: argparse.Namespace) -> None:
    if options.parameters:
        raise InvalidValue(
            f"--parameters {options.parameters} has no step to measure; add --compute 180ms, or use --model"
        )
    if options.delay:
        raise InvalidValue(
            f"--delay {options.delay} is for plans from figures, and this one measures the delay; add "
            "--compute 180ms, or leave it out"
        )


def _in_job(options: argparse.Namespace) -> Source:
    import torch.distributed as dist

    from ..teardown import shutdown

    ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks not in (None, ranks):
        raise InvalidValue(
            f"--ranks {options.ranks} are not those of this job, which has {ranks}; leave it out, or use "
            f"--more-ranks {options.ranks}"
        )
    if ranks < 2:
        raise InvalidValue("a job of 1 rank exchanges nothing; start 2 or more, or none: gradlane plan")
    rate = parse_link(options.link or "none", FASTEST).payload_bytes_per_s
    work = workload(options.model or MODEL)
    dist.init_process_group("gloo")
    try:
        task = Task(work, options.strategy, options.bucket_mb, options.per_node, rate)
        return Source(measure_plan(dist.group.WORLD, task), dist.get_rank())
    finally:
        shutdown()


def _here(options: argparse.Namespace) -> Source:
    link = parse_link(options.link or "none")
    task = Task(workload(options.model or MODEL), options.strategy, options.bucket_mb, options.per_node)
    figures, note = measure_locally(task, 2 if options.ranks is None else options.ranks, link)
    return Source(figures, note=note)
