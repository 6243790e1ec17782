"""Train a small model with each arm, and compare the loss against steps, bytes and wall-clock seconds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .json_output import add_json, hand_over, json_output

if TYPE_CHECKING:
    from ..train.train_plan import TrainPlan

NAME = "train"
HELP = "train a small model with each arm: loss against steps, bytes and seconds"
EXAMPLES = """\
  gradlane train --arm "Sharded(Int8())" --arm torch.fp16
  gradlane train --arm "ErrorFeedback(PowerSGD(4))" --seeds 3 --lr 0.05,0.1,0.2
  gradlane train --task digits --optimizer adam --arm "Cast(Mean(), bfloat16)"
  gradlane train --link 100mbit --arm "Auto()" --steps 600 --json train.json
  gradlane train --config train.toml   arm = ["Sharded(Int8())"], ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task",
        default="bytes",
        help="bytes: a language model on the standard library's source; digits: scikit-learn's images "
        "(default bytes)",
    )
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="ARM",
        help="a strategy as text, or a hook of torch: torch.fp16, torch.powersgd(4), ...; repeat for more. "
        "ddp, dense training without a hook, is always included",
    )
    parser.add_argument("--ranks", type=int, default=2, help="local processes of each arm (default 2)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="number of runs, each with other weights and data, 1 to 30 (default 1)",
    )
    parser.add_argument(
        "--link", default="none", help="a link to emulate, such as 100mbit or 1gbit (default none: unshaped)"
    )
    parser.add_argument("--optimizer", default="sgd", help="sgd, with momentum 0.9, or adam (default sgd)")
    parser.add_argument(
        "--lr",
        metavar="RATE[,RATE...]",
        help="highest learning rate (default 0.1 for sgd, 0.003 for adam). Of several, as 0.05,0.1,0.2, each "
        "arm gets its best: the one with the lowest final loss on a seed that is not reported",
    )
    parser.add_argument(
        "--batch", type=int, help="examples per rank and step (default 8 for bytes, 32 for digits)"
    )
    parser.add_argument(
        "--width",
        type=int,
        help="width of the model's layers (default 64 for bytes, 128 for digits)",
    )
    parser.add_argument(
        "--every", type=int, help="steps between two evaluations (default: a 20th of the steps)"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="held-out loss to reach (default: the loss of dense training shortly before its end)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=900.0,
        help="seconds after which the run ends, with the results until then; tuning counts too (default 900)",
    )
    add_json(parser, "; `gradlane report` makes a page of it")


def run(options: argparse.Namespace) -> int:
    from ..bench.link import parse_link
    from ..train.learning_rates import parse_rates
    from ..train.train_plan import TrainPlan

    names = (
        "task",
        "ranks",
        "steps",
        "seeds",
        "optimizer",
        "batch",
        "width",
        "every",
        "target",
        "budget",
    )
    chosen = {name: getattr(options, name) for name in names}
    rates = () if options.lr is None else parse_rates(options.lr)
    plan = TrainPlan(arms=tuple(options.arm), link=parse_link(options.link), lr=rates, **chosen)
    with json_output(options.json) as file:
        document = run_and_show(plan)
    hand_over(document, options.json)
    if file is not None:
        print(f"wrote {file}")
    return exit_code(document)


def run_and_show(plan: TrainPlan) -> dict[str, Any]:
    """Run a plan, show its progress, then its table and what that says; returns the document."""
    from ..train.train_arms import train_arms
    from .train_view import ProgressLines, console, print_document

    screen = console()
    with ProgressLines(plan, screen) as progress:
        document = train_arms(plan, progress, on_note=lambda note: print(note, file=sys.stderr))
    print_document(document, screen)
    return document


def exit_code(document: dict[str, Any]) -> int:
    return 130 if document["ended"] == "interrupted" else 0
