"""Turn recorded events (gradlane.JsonLines) into one Chrome trace, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

NAME = "trace"
HELP = "turn recorded events into a trace for Perfetto or chrome://tracing"
EXAMPLES = """\
  gradlane trace comm-0.jsonl comm-1.jsonl
  gradlane trace comm-*.jsonl --steps 10:20 --out trace.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="one for each rank")
    parser.add_argument("--out", type=Path, default=Path("gradlane-trace.json"), help="default: %(default)s")
    parser.add_argument("--steps", metavar="A:B", help="only steps A to B-1, such as 10:20")
    parser.add_argument("--json", action="store_true", help="print the trace, and write no file")


def run(options: argparse.Namespace) -> int:
    from ..telemetry.trace import chrome_trace, read_lines

    runs = [read_lines(path) for path in options.files]
    trace = json.dumps(chrome_trace(runs, _range(options.steps)))
    if options.json:
        print(trace)
        return 0
    options.out.write_text(trace)
    print(f"wrote {options.out}; open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
        raise ValueError(f"--steps {text}: write A:B with A below B, such as 10:20")
    return range(int(first), int(last))
