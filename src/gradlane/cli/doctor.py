"""Check this machine, or under torchrun this job: what is broken, what costs time, how fast the link is.

Alone it measures between two local ranks. ``torchrun ... -m gradlane doctor`` measures between the ranks of
the job. The exit code is 0 unless something is broken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

NAME = "doctor"
HELP = "check this machine or job, and measure the link between the ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parameters",
        default="9.4M",
        metavar="N",
        help="size of the model for the estimates: 350k, 9.4M, 7B (default 9.4M)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="estimate for a link of this rate, such as 1gbit, in place of the measured one",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the report as JSON; with a file, write the JSON there and print the usual text",
    )


def run(options: argparse.Namespace) -> int:
    from ..bench.link import parse_link
    from ..bench.record import check_writable
    from ..doctor import examine
    from ..doctor.estimates import parse_count
    from .doctor_view import print_report

    link = parse_link(options.link) if options.link else None
    parameters = parse_count(options.parameters)
    file = None if options.json in (None, "-") else Path(options.json)
    check_writable(file)
    report = examine(parameters, rate_bits=link.rate_bits if link else None)
    if report.rank == 0:  # the other ranks of a job have the same report
        text = json.dumps(report.as_dict(), indent=1)
        if options.json == "-":
            print(text)
        else:
            print_report(report, link.name if link and link.rate_bits else None)
        if file is not None:
            file.write_text(text + "\n")
    return 1 if report.broken else 0
