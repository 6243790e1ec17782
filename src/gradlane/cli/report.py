"""Make one HTML page, which needs no other file, from what bench and train wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "report"
HELP = "make one HTML page from the JSON of bench and train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="FILE.json", help="what `gradlane bench` or `train` wrote"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradlane-report.html"),
        metavar="FILE.html",
        help="where to write the page (default gradlane-report.html)",
    )


def run(options: argparse.Namespace) -> int:
    from ..report.write import write_page

    write_page(options.inputs, options.out)
    print(f"wrote {options.out}")
    return 0
