"""Write one self-contained HTML page from the JSON of bench, train and plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

NAME = "report"
HELP = "write one HTML page from the JSON of bench, train and plan"
EXAMPLES = """\
  gradlane report bench.json train.json plan.json --out report.html
  gradlane report bench.json --json   the verdict, for programs"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE.json",
        help="files of `gradlane bench --json`, `gradlane train --json` or `gradlane plan --json`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradlane-report.html"),
        metavar="FILE.html",
        help="where to write the page (default gradlane-report.html)",
    )
    parser.add_argument("--json", action="store_true", help="print what the files say as JSON")


def run(options: argparse.Namespace) -> int:
    from ..report.write import write_page

    verdicts = write_page(options.inputs, options.out)
    if options.json:
        print(json.dumps({"page": str(options.out), "verdicts": verdicts}, indent=1))
        return 0
    for sentence in (sentence for verdict in verdicts.values() for sentence in verdict):
        print(sentence)
    print(f"wrote {options.out}")
    return 0
