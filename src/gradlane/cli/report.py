"""Write one self-contained HTML page from the JSON of bench and train."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "report"
HELP = "write one HTML page from the JSON of bench and train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE.json",
        help="files of `gradlane bench --json` or `gradlane train --json`",
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
