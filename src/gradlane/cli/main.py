"""``gradlane VERB ...``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import GradlaneError
from . import bench, completion, demo, doctor, plan, report, strategies, trace, train
from .config_file import add_config, with_config
from .extras import way_to_install
from .verb_parser import VerbParser

# Each has NAME, HELP, EXAMPLES, add_arguments(parser) and run(options). Heavy imports are in run.
VERBS = (demo, doctor, plan, bench, train, report, trace, strategies, completion)
CONFIGURED = (demo, plan, bench, train)
WAY = """\
the way:
  gradlane demo                                  see it work, in a minute
  gradlane doctor                                is this machine healthy?
  gradlane plan --link 1gbit                     which strategies would pay?
  gradlane bench --link 1gbit --json bench.json  how long are their steps?
  gradlane train --arm "Sharded(Int8())"         what do they do to the loss?
  gradlane report bench.json                     one page of it
  gradlane strategies PowerSGD                   all about one name

exit codes: 0 done, 1 `doctor` found something broken, 2 wrong input, 130 interrupted.
`gradlane VERB --help` has examples of each."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        import torch

        from ..kernels.native import kernels_in_use
        from ..kernels.triton_state import device_kernels_in_use

        on_gpus = device_kernels_in_use(torch.device("cuda"))
        print(f"gradlane {__version__}\nkernels: {kernels_in_use()}; on GPUs {on_gpus}")
        parser.exit()


def parser_and_verbs() -> tuple[VerbParser, dict[str, VerbParser]]:
    parser = VerbParser(
        prog="gradlane",
        description="Control how gradients travel in DDP and FSDP2.",
        epilog=WAY,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and the kernels in use")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB")
    found = {}
    for verb in VERBS:
        made = verbs.add_parser(
            verb.NAME,
            help=verb.HELP,
            description=verb.__doc__,
            epilog=f"examples:\n{verb.EXAMPLES}",
        )
        verb.add_arguments(made)
        if verb in CONFIGURED:
            add_config(made)
        made.set_defaults(run=verb.run)
        found[verb.NAME] = made
    return parser, found


def main(argv: Sequence[str] | None = None) -> int:
    parser, verbs = parser_and_verbs()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in {verb.NAME for verb in CONFIGURED}:
            words = [words[0], *with_config(words[0], verbs[words[0]], words[1:])]
        options = parser.parse_args(words)
        if options.verb is None:
            parser.print_help()
            return 0
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as missing:
        print(f"gradlane: {missing}; {way_to_install('cli', missing)}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError, GradlaneError) as error:
        print(f"gradlane: {error}", file=sys.stderr)
        return 2
