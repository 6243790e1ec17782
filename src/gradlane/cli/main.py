"""``gradlane VERB ...``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import GradlaneError
from . import bench, demo, doctor, report, trace, train

# Each has NAME, HELP, add_arguments(parser) and run(options). Heavy imports are in run.
VERBS = (demo, doctor, bench, train, report, trace)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        from ..kernels.native import kernels_in_use

        print(f"gradlane {__version__}\nkernels: {kernels_in_use()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gradlane", description="Control how gradients travel in DDP.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and the kernels in use")
    verbs = parser.add_subparsers(title="verbs", dest="verb", required=True)
    for verb in VERBS:
        verb_parser = verbs.add_parser(verb.NAME, help=verb.HELP, description=verb.__doc__)
        verb.add_arguments(verb_parser)
        verb_parser.set_defaults(run=verb.run)
    options = parser.parse_args(argv)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as missing:
        print(
            f"gradlane: {missing}; install what the command line needs: pip install 'gradlane[cli]'",
            file=sys.stderr,
        )
        return 2
    except (ValueError, TypeError, OSError, GradlaneError) as error:
        print(f"gradlane: {error}", file=sys.stderr)
        return 2
