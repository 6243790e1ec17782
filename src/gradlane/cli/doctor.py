"""Check this machine, or under torchrun this job: what is broken, what costs time, how fast the link is.

Alone it measures between two local ranks. ``torchrun ... -m gradlane doctor`` measures between the ranks of
the job. The exit code is 0 unless something is broken.
"""

from __future__ import annotations

import argparse

from .json_output import add_json, hand_over, json_output

NAME = "doctor"
HELP = "check this machine or job, and measure the link between the ranks"
EXAMPLES = """\
  gradlane doctor                                  this machine
  torchrun --nproc-per-node 2 -m gradlane doctor   this job
  gradlane doctor --parameters 125M --link 1gbit
  gradlane doctor --json | jq .findings"""


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
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from ..bench.link import parse_link
    from ..doctor import examine
    from ..doctor.estimates import parse_count
    from .doctor_view import print_report

    link = parse_link(options.link) if options.link else None
    parameters = parse_count(options.parameters)
    with json_output(options.json):
        report = examine(parameters, rate_bits=link.rate_bits if link else None)
        if report.rank == 0:  # the other ranks of a job have the same report
            print_report(report, link.name if link and link.rate_bits else None)
    if report.rank == 0:
        hand_over(report.as_dict(), options.json)
    return 1 if report.broken else 0
