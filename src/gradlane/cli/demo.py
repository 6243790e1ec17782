"""Train a small language model on local processes, with and without gradlane, and write a page of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from .json_output import add_json, hand_over, json_output

NAME = "demo"
HELP = "train a small model on local processes, with and without gradlane; writes a page"
EXAMPLES = """\
  gradlane demo
  gradlane demo --steps 50 --arm "ErrorFeedback(PowerSGD(4))" --out my.html
  gradlane demo --link 1gbit"""
ARMS = (
    "Cast(Mean(), bfloat16)",
    "Sharded(Int8())",
    "ErrorFeedback(Sharded(Int4()))",
    "LocalSteps(ErrorFeedback(Sharded(Int4())), every=10)",
    "Auto(at_most='int4')",
)
LINK = "100mbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="steps for each arm (default 150)")
    parser.add_argument("--ranks", type=int, default=2, help="local processes of each arm (default 2)")
    parser.add_argument(
        "--arm",
        action="append",
        metavar="STRATEGY",
        help="a strategy to compare, as text; repeat for more (default: bf16, int8, int4, local steps, Auto)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradlane-demo.html"),
        metavar="FILE.html",
        help="where to write the page (default gradlane-demo.html)",
    )
    parser.add_argument("--link", default=LINK, metavar="RATE", help=f"to emulate (default {LINK})")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from ..bench.emulation import why_not
    from ..bench.link import parse_link
    from ..bench.record import check_writable
    from ..errors import InvalidValue
    from ..report.write import write_record_page
    from ..train.train_plan import TrainPlan
    from .train import exit_code, run_and_show

    plan = TrainPlan(
        arms=tuple(options.arm or ARMS),
        ranks=options.ranks,
        steps=options.steps,
        link=parse_link(options.link),
    )
    if options.json == options.out:
        raise InvalidValue(f"{options.out} is the file of both --out and --json; choose another file for one")
    check_writable(options.out)
    with json_output(options.json) as file:
        print(
            f"A byte-level transformer learns Python's standard library: {plan.ranks} processes for each "
            f"arm, {plan.steps} steps."
        )
        if plan.link.rate_bits is not None and why_not() is None:
            print(
                f"Each process runs on an emulated host, on a link of {plan.link.name} each way "
                "(network namespaces, tc)."
            )
        document = run_and_show(plan)
        write_record_page(document, file, options.out)
        print(f"wrote {options.out}; open it in a browser")
    hand_over(document, options.json)
    return exit_code(document)
