"""Compare strategies, torch's hooks and plain DDP, step by step in turn, on links of a given rate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

NAME = "bench"
HELP = "compare strategies and torch's hooks on emulated links"
ARMS = ("torch.fp16", "Cast(Mean(), bfloat16)", "Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))")


ARGUMENTS: dict[str, dict[str, Any]] = {
    "--arm": {
        "action": "append",
        "metavar": "ARM",
        "help": "ddp, a strategy as text, or torch.NAME: allreduce, fp16, bf16, noop, powersgd, "
        "batched_powersgd, quantize_pertensor, quantize_perchannel (powersgd(4) is rank 4); repeat for more. "
        "ddp and Noop(), which is compute alone, are always there",
    },
    "--link": {
        "action": "append",
        "metavar": "RATE",
        "help": "100mbit, 2.5gbit, ... or none, unshaped; repeat for more (default none). "
        "Rates need root and iproute2",
    },
    "--ranks": {
        "action": "append",
        "type": int,
        "metavar": "N",
        "help": "processes, each on a host of its own; repeat for more (default 2)",
    },
    "--model": {
        "default": "mlp9m",
        "help": "mlp9m, resnet18, gpt-small, or module:function of yours that returns (model, batch), "
        "where model(*batch) is the loss (default mlp9m)",
    },
    "--bucket-mb": {
        "type": float,
        "metavar": "MB",
        "help": "DDP's bucket_cap_mb (default: DDP's own, 1 for the first and then 25)",
    },
    "--steps": {"type": int, "default": 20, "help": "measured steps of each arm (default 20)"},
    "--warmup": {"type": int, "default": 4, "help": "steps before those (default 4)"},
    "--budget": {
        "type": float,
        "default": 900.0,
        "metavar": "SECONDS",
        "help": "end after this long, with what there is (default 900)",
    },
    "--patience": {
        "type": float,
        "metavar": "SECONDS",
        "help": "an arm whose step takes longer counts as hung "
        "(default: 60, and ten times what the link needs for a dense gradient)",
    },
    "--json": {"type": Path, "metavar": "FILE", "help": "write the record of the run"},
    "--page": {
        "type": Path,
        "metavar": "FILE.html",
        "help": "write the page that `gradlane report` makes of it",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, settings in ARGUMENTS.items():
        parser.add_argument(name, **settings)


def run(options: argparse.Namespace) -> int:
    from ..bench.compare import Plan, compare
    from ..bench.link import parse_link
    from ..bench.record import check_writable, write_json
    from ..report.write import write_record_page
    from .bench_table import print_record, progress_bar

    plan = Plan(
        arms=options.arm or ARMS,
        links=[parse_link(text) for text in options.link or ("none",)],
        ranks=options.ranks or (2,),
        model=options.model,
        bucket_mb=options.bucket_mb,
        steps=options.steps,
        warmup=options.warmup,
        budget_s=options.budget,
        patience_s=options.patience,
    )
    check_writable(options.json)
    check_writable(options.page)
    _warn_where_links_cannot_be(plan.links)
    with progress_bar(plan.turns) as show:
        record = compare(plan, show)
    print_record(record)
    if options.json:
        write_json(options.json, record)
    if options.page:
        write_record_page(record, (options.json or Path("gradlane-bench.json")).name, options.page)
    return 130 if record["ended"] == "interrupted" else 0


def _warn_where_links_cannot_be(links: Any) -> None:
    from ..bench.network import why_not

    if any(link.rate_bits is not None for link in links) and (reason := why_not()):
        print(f"gradlane: links cannot be emulated here: {reason}; going on unshaped", file=sys.stderr)
