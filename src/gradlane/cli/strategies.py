"""List the names that a strategy's text may use, or tell all about one of them."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from typing import Any

NAME = "strategies"
HELP = "list strategies, codecs and rules, or tell all about one"
EXAMPLES = """\
  gradlane strategies
  gradlane strategies PowerSGD
  gradlane strategies --json | jq -r '.[].name'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of them, such as PowerSGD")
    parser.add_argument("--json", action="store_true", help="print names, kinds and options as JSON")


def run(options: argparse.Namespace) -> int:
    from ..errors import InvalidValue
    from ..strategies.suggestions import instead_of_name
    from ..strategies.text import exported_parts

    parts = exported_parts()
    if options.name is not None and options.name not in parts:
        raise InvalidValue(f"{options.name!r} is not known; {instead_of_name(options.name, parts, ())}")
    if options.json:
        chosen = sorted(parts) if options.name is None else [options.name]
        print(json.dumps([_entry(name, parts[name]) for name in chosen], indent=1))
    elif options.name is None:
        _print_all(parts)
    else:
        _print_one(options.name, parts[options.name])
    return 0


def _entry(name: str, part: Callable[..., Any]) -> dict[str, Any]:
    """``options`` has the text of each default; null where there is none."""
    options = inspect.signature(part).parameters.values() if isinstance(part, type) else ()
    defaults = {o.name: None if o.default is o.empty else str(o.default) for o in options}
    return {"name": name, "kind": kind_of(part), "what": first_sentence(part), "options": defaults}


def _print_all(parts: dict[str, Callable[..., Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    width = max(map(len, parts))
    for title, kind in KINDS.items():
        console.print(title, style="bold")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=width + 2, no_wrap=True)
        table.add_column(overflow="fold")
        for name in sorted(parts):
            if kind_of(parts[name]) == kind:
                table.add_row(f"  {name}", first_sentence(parts[name]))
        console.print(table, "")
    console.print("They nest, as in ErrorFeedback(Sharded(Int4())) or Combined(Median()).")
    console.print("`gradlane strategies NAME` tells all about one.")


def _print_one(name: str, part: Callable[..., Any]) -> None:
    options = inspect.signature(part).parameters.values()
    shown = ", ".join(str(option.replace(annotation=option.empty)) for option in options)
    print(f"{name}({shown})" if isinstance(part, type) else name, inspect.getdoc(part), sep="\n\n")


KINDS = {
    "strategies, alone or around others": "strategy",
    "codecs, inside Sharded, Gathered or Summed": "codec",
    "rules, inside Combined": "rule",
    "functions, as aggregate=": "function",
    "watches, as watch=": "watch",
}


def kind_of(part: object) -> str:
    from ..aggregate.rule import Rule
    from ..codecs.base import Codec
    from ..core.strategy import Strategy

    if not isinstance(part, type):
        return "function"
    kinds = {Strategy: "strategy", Codec: "codec", Rule: "rule"}
    return next((kind for base, kind in kinds.items() if issubclass(part, base)), "watch")


def first_sentence(part: object) -> str:
    """Of its docstring, without literature."""
    text = " ".join((inspect.getdoc(part) or "").split("\n\n")[0].split()).replace("``", "")
    return text.split(". ")[0].rstrip(".")
