"""Will it pay? Predict the step of each strategy, from measurements or from figures alone.

Under torchrun it measures the job's link, compute and the strategies' work. Alone it starts its own ranks on
this machine, joined by emulated links. With --compute nothing runs but the strategies' work, for any number
of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .json_output import add_json, hand_over, json_output

NAME = "plan"
HELP = "predict which strategies pay on a link, before the run"
EXAMPLES = """\
  gradlane plan                          this machine
  gradlane plan --link 1gbit --ranks 4   emulated links
  torchrun --nproc-per-node 2 -m gradlane plan --model my_model:build
  gradlane plan --parameters 7B --compute 400ms --ranks 64 --link 25gbit
  gradlane plan --strategy "ErrorFeedback(PowerSGD(8))" --json | jq .results
  gradlane plan --config plan.toml       link = "1gbit", ..."""
MORE_RANKS = (8, 64)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "MODEL",
        "help": "mlp9m, resnet18, gpt-small, or module:function of yours that returns (model, batch), where "
        "model(*batch) is the loss (default mlp9m)",
    },
    "--parameters": {"metavar": "N", "help": "with --compute: a model of 350k, 125M, 7B in place of --model"},
    "--compute": {
        "metavar": "TIME",
        "help": "time of forward and backward on one rank, as 180ms: plan from figures, without a run",
    },
    "--ranks": {"type": int, "metavar": "N", "help": "number of ranks (default 2); torchrun's in a job"},
    "--per-node": {
        "type": int,
        "metavar": "N",
        "help": "ranks that share the link of a node (default 1; in a job, the ranks of a host)",
    },
    "--link": {
        "metavar": "RATE",
        "help": "1gbit, 25gbit, ...: emulated between ranks on this machine; in a job, plan for this rate in "
        "place of the measured one",
    },
    "--delay": {"metavar": "TIME", "help": "with --compute: of the link, in one direction (default 50us)"},
    "--strategy": {
        "action": "append",
        "metavar": "STRATEGY",
        "help": "a strategy as text; repeat for more (default: a ladder from exact to lossy)",
    },
    "--more-ranks": {
        "action": "append",
        "type": int,
        "metavar": "N",
        "help": "also extrapolate to this many ranks; repeat for more (default 8 and 64)",
    },
    "--bucket-mb": {"type": float, "metavar": "MB", "help": "DDP's bucket_cap_mb (default: DDP's default)"},
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
    from ..bench.plan_record import plan_record
    from ..bench.record import check_writable
    from ..report.write import write_record_page
    from .plan_source import find_figures
    from .plan_table import print_plan

    check_writable(options.page)
    with json_output(options.json):
        found = find_figures(options)
    if found.rank != 0:
        return 0  # the other ranks of a job have the same figures
    figures = found.figures
    settings = {
        "model": options.parameters or options.model or "mlp9m",
        "parameters": sum(figures.bucket_bytes) // figures.itemsize,
        "ranks": figures.curves.world,
        "per_node": figures.curves.per_node,
        "link": options.link or "measured",
        "from": "figures" if options.compute else "measurements",
    }
    more = _more_ranks(options.more_ranks, figures.curves.world, figures.curves.per_node)
    record = plan_record(figures, settings, more_ranks=more, note=found.note)
    with json_output(options.json) as file:
        print_plan(record)
        if options.page:
            write_record_page(record, file, options.page)
    hand_over(record, options.json)
    return 0


def _more_ranks(wanted: list[int] | None, ranks: int, per_node: int) -> list[int]:
    from ..bench.plan_given import MOST
    from ..errors import InvalidValue

    if wanted is None:
        return [n for n in MORE_RANKS if n > ranks and n % per_node == 0]
    for n in wanted:
        if not ranks < n <= MOST or n % per_node:
            nodes = f", a multiple of {per_node}" if per_node > 1 else ""
            raise InvalidValue(
                f"--more-ranks {n} cannot be added; use a number above {ranks}{nodes}, up to {MOST:,}"
            )
    return sorted(set(wanted))
