"""``gradlane VERB ...``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gradlane", description="Control how gradients travel in DDP.")
    parser.add_argument("--version", action="version", version=f"gradlane {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", required=True)
    demo = verbs.add_parser("demo", help="train a small model on local processes, with and without gradlane")
    demo.add_argument("--steps", type=int, default=150, help="steps for each arm (default 150)")
    demo.add_argument("--ranks", type=int, default=2, help="local processes (default 2)")
    demo.add_argument(
        "--arm",
        action="append",
        metavar="STRATEGY",
        help="a strategy to compare, as text; repeat for more (default: Mean and the casts)",
    )
    options = parser.parse_args(argv)
    try:
        from .demo import run_demo

        run_demo(steps=options.steps, ranks=options.ranks, arms=options.arm)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as missing:
        print(
            f"gradlane: {missing}; install the command line's parts: pip install 'gradlane[cli]'",
            file=sys.stderr,
        )
        return 2
    except (ValueError, TypeError) as error:
        print(f"gradlane: {error}", file=sys.stderr)
        return 2
    return 0
