"""Train a small language model on local processes, with and without gradlane."""

from __future__ import annotations

import argparse

NAME = "demo"
HELP = "train a small model on local processes, with and without gradlane"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="steps for each arm (default 150)")
    parser.add_argument("--ranks", type=int, default=2, help="local processes (default 2)")
    parser.add_argument(
        "--arm",
        action="append",
        metavar="STRATEGY",
        help="a strategy to compare, as text; repeat for more (default: Mean and the casts)",
    )


def run(options: argparse.Namespace) -> int:
    from .demo_run import run_demo

    run_demo(steps=options.steps, ranks=options.ranks, arms=options.arm)
    return 0
