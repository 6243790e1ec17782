"""Train a small language model on local processes, with and without gradlane, and write a page of results."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "demo"
HELP = "train a small model on local processes, with and without gradlane; writes a page"
ARMS = (
    "Cast(Mean(), bfloat16)",
    "Sharded(Int8())",
    "ErrorFeedback(Sharded(Int4()))",
    "LocalSteps(ErrorFeedback(Sharded(Int4())), every=10)",
)
LINK = "100mbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="steps for each arm (default 150)")
    parser.add_argument("--ranks", type=int, default=2, help="local processes of each arm (default 2)")
    parser.add_argument(
        "--arm",
        action="append",
        metavar="STRATEGY",
        help="a strategy to compare, as text; repeat for more (default: bf16, int8, int4, local steps)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradlane-demo.html"),
        metavar="FILE.html",
        help="where to write the page (default gradlane-demo.html)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="also write the figures of the page as JSON"
    )


def run(options: argparse.Namespace) -> int:
    from ..bench.emulation import why_not
    from ..bench.link import parse_link
    from ..bench.record import check_writable, write_json
    from ..errors import InvalidValue
    from ..report.write import write_record_page
    from ..train.train_plan import TrainPlan
    from .train import exit_code, run_and_show

    plan = TrainPlan(
        arms=tuple(options.arm or ARMS), ranks=options.ranks, steps=options.steps, link=parse_link(LINK)
    )
    if options.json == options.out:
        raise InvalidValue(f"{options.out} is the file of both --out and --json; choose another file for one")
    check_writable(options.out)
    check_writable(options.json)
    print(
        f"A byte-level transformer learns Python's standard library: {plan.ranks} processes for each arm, "
        f"{plan.steps} steps."
    )
    if why_not() is None:
        print(
            f"Each process runs on an emulated host, on a link of {LINK} each way (network namespaces, tc)."
        )
    document = run_and_show(plan)
    if options.json:
        write_json(options.json, document)
    write_record_page(document, (options.json or Path("gradlane-demo.json")).name, options.out)
    print(f"wrote {options.out}; open it in a browser")
    return exit_code(document)
