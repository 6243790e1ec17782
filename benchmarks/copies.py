"""What the benchmarks of kernels share: their options, how an arm is timed, and the file they write."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradlane as gl


def parser_for(text: str | None, *, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    return parser


def timed(act: Callable[..., object], *given: object) -> float:
    begin = time.perf_counter()
    act(*given)
    return time.perf_counter() - begin


def write(options: argparse.Namespace, rows: list[dict[str, object]], **more: object) -> None:
    """The rows, with the command and all options, where ``--json`` asks for them."""
    if not options.json:
        return
    where = {"torch": torch.__version__, "gradlane": gl.__version__, "cpu": platform.machine()}
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    told = {"command": " ".join(sys.argv), **where, **settings, **more, "rows": rows}
    options.json.write_text(json.dumps(told, indent=1) + "\n")
