"""``--json`` prints the figures in place of the tables; ``--json FILE`` writes them, too."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ..bench.record import check_writable, write_json

PRINTED = Path("-")


def add_json(parser: argparse.ArgumentParser, also: str = "") -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=PRINTED,
        metavar="FILE.json",
        help=f"print all figures as JSON in place of tables; with a file, write them there as well{also}",
    )


@contextmanager
def json_output(asked: Path | None) -> Iterator[Path | None]:
    """The file that was asked for, if any. Where JSON is to be printed, nothing else is: not a table."""
    if asked != PRINTED:
        check_writable(asked)
        yield asked
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield None


def hand_over(record: dict[str, Any], asked: Path | None) -> None:
    """Print the record, or write its file, or neither."""
    if asked == PRINTED:
        print(json.dumps(record, indent=1, allow_nan=False), file=sys.stdout)
    elif asked is not None:
        write_json(asked, record)
