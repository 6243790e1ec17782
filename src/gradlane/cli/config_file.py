"""``--config FILE.toml``: options of a verb from a file. Those of the command line come before them."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidValue
from .verb_parser import VerbParser


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help='options from a file, as `link = ["1gbit", "100mbit"]`; the command line overrides it',
    )


def with_config(verb: str, parser: VerbParser, given: Sequence[str]) -> list[str]:
    """The words after a verb, and before them those of its file, if there is one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file = finder.parse_known_args(given)[0].config
    if file is None:
        return list(given)
    options = parser.options
    spelled = {word.partition("=")[0] for word in given if word.startswith("--")}
    words: list[str] = []
    for name, value in _table(file, verb).items():
        option = f"--{name.replace('_', '-')}"
        if option not in options or option in ("--config", "--help"):
            near = difflib.get_close_matches(option, options, 1)
            way_out = f"did you mean {near[0][2:]}?" if near else f"`gradlane {verb} --help` lists them"
            raise InvalidValue(f"{file}: {verb} has no option {name}; {way_out}")
        if option not in spelled:
            words += _words(file, option, value, option in parser.repeatable)
    return [*words, *given]


def _table(file: Path, verb: str) -> Mapping[str, Any]:
    """The table of the verb; all of a file that has no tables."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{file} cannot be read as TOML: {error}") from None
    tables = {name for name, value in content.items() if isinstance(value, dict)}
    if not tables:
        return content
    if verb not in tables:
        raise InvalidValue(
            f"{file} has no [{verb}]; it has {', '.join(f'[{name}]' for name in sorted(tables))}"
        )
    if len(tables) < len(content):
        alone = next(name for name in content if name not in tables)
        raise InvalidValue(f"{file}: {alone} stands in no table; move it below [{verb}]")
    return content[verb]  # type: ignore[no-any-return]


def _words(file: Path, option: str, value: object, repeatable: bool) -> Iterator[str]:
    if isinstance(value, bool):
        return iter([option] if value else [])
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not repeatable:
        raise InvalidValue(f"{file}: {option[2:]} takes one value, got a list of {len(value)}")
    return iter([f"{option}={each}" for each in values])
