"""Compare strategies, torch's hooks and plain DDP on links of a given rate; the arms step in rounds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .json_output import add_json, hand_over, json_output

NAME = "bench"
HELP = "compare strategies and torch's hooks on emulated links"
EXAMPLES = """\
  gradlane bench                       this machine, unshaped
  gradlane bench --link 1gbit --link 100mbit --page bench.html
  gradlane bench --arm 'torch.powersgd(4)' --arm "ErrorFeedback(PowerSGD(4))"
  gradlane bench --model my_model:build --bucket-mb 10 --json bench.json
  gradlane bench --nodes 2 --per-node 2 --link 1gbit --arm hsdp
  gradlane bench --config bench.toml   link = ["1gbit"], ..."""
ARMS = ("torch.fp16", "Cast(Mean(), bfloat16)", "Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))")


ARGUMENTS: dict[str, dict[str, Any]] = {
    "--arm": {
        "action": "append",
        "metavar": "ARM",
        "help": "ddp, a strategy as text, or torch.NAME: allreduce, fp16, bf16, noop, powersgd, "
        "batched_powersgd, quantize_pertensor, quantize_perchannel (powersgd(4) has rank 4); with --nodes "
        "also hsdp, or 'hsdp: STRATEGY'; "
        "repeat for more. ddp and Noop(), which is compute alone, are always included",
    },
    "--link": {
        "action": "append",
        "metavar": "RATE",
        "help": "100mbit, 2.5gbit, ..., or none for an unshaped link; repeat for more (default none). "
        "A rate needs root and iproute2",
    },
    "--ranks": {
        "action": "append",
        "type": int,
        "metavar": "N",
        "help": "number of processes, each on its own emulated host; repeat for more (default 2)",
    },
    "--nodes": {
        "type": int,
        "metavar": "N",
        "help": "in place of --ranks: this many emulated hosts of several ranks each. --link is between them",
    },
    "--per-node": {
        "type": int,
        "metavar": "G",
        "help": "ranks of each node, which share its link and know their node (ranks_per_node)",
    },
    "--model": {
        "default": "mlp9m",
        "help": "mlp9m, resnet18, gpt-small, or your own module:function that returns (model, batch), "
        "where model(*batch) is the loss (default mlp9m)",
    },
    "--bucket-mb": {
        "type": float,
        "metavar": "MB",
        "help": "DDP's bucket_cap_mb (default: DDP's default, 1 for the first bucket and 25 for the others); "
        "hsdp has none",
    },
    "--steps": {"type": int, "default": 20, "help": "measured steps of each arm (default 20)"},
    "--warmup": {"type": int, "default": 4, "help": "steps before the measured ones (default 4)"},
    "--in-a-row": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "steps that an arm takes before the next one; of several the first is not counted, since "
        "other arms have used the caches (default 1)",
    },
    "--budget": {
        "type": float,
        "default": 900.0,
        "metavar": "SECONDS",
        "help": "stop after this time, and show the results until then (default 900)",
    },
    "--timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": "an arm whose step takes longer counts as hung "
        "(default: 60, plus ten times the link's time for a dense gradient)",
    },
    "--page": {
        "type": Path,
        "metavar": "FILE.html",
        "help": "write the page that `gradlane report` makes of it",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, settings in ARGUMENTS.items():
        parser.add_argument(name, **settings)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from ..bench.bench_arms import bench_arms
    from ..bench.bench_plan import BenchPlan
    from ..bench.link import parse_link
    from ..bench.nodes import nodes_from
    from ..bench.record import check_writable
    from ..report.write import write_record_page
    from .bench_table import print_record, progress_bar

    plan = BenchPlan(
        arms=options.arm or ARMS,
        links=[parse_link(text) for text in options.link or ("none",)],
        ranks=options.ranks or (2,),
        model=options.model,
        bucket_mb=options.bucket_mb,
        steps=options.steps,
        warmup=options.warmup,
        in_a_row=options.in_a_row,
        budget_s=options.budget,
        timeout_s=options.timeout,
        nodes=nodes_from(options.nodes, options.per_node, options.ranks),
    )
    check_writable(options.page)
    with json_output(options.json) as file:
        _warn_if_links_cannot_be_emulated(plan.links)
        with progress_bar(plan.total_steps) as show:
            record = bench_arms(plan, show)
        print_record(record)
        if options.page:
            write_record_page(record, file, options.page)
    hand_over(record, options.json)
    return 130 if record["ended"] == "interrupted" else 0


def _warn_if_links_cannot_be_emulated(links: Any) -> None:
    from ..bench.emulation import why_not

    if any(link.rate_bits is not None for link in links) and (reason := why_not()):
        print(
            f"gradlane: links cannot be emulated here: {reason}; the run continues unshaped", file=sys.stderr
        )
