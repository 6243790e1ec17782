"""The parser of a verb: it knows its options, and fills the paragraphs of its help."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any


class VerbParser(argparse.ArgumentParser):
    """``actions`` are all arguments, with --help; ``repeatable`` those that may be given several times."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.actions: list[argparse.Action] = []
        self.repeatable: set[str] = set()
        super().__init__(*arguments, **options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.description, self.epilog = filled(self.description), filled(self.epilog)

    def add_argument(self, *arguments: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*arguments, **options)
        self.actions.append(action)
        if options.get("action") == "append":
            self.repeatable |= set(arguments)
        return action

    @property
    def options(self) -> dict[str, argparse.Action]:
        """The long ones, by name."""
        named = [(name, action) for action in self.actions for name in action.option_strings]
        return {name: action for name, action in named if name.startswith("--")}


def filled(text: str | None) -> str:
    """Paragraphs of at most 78 columns; lists, which are indented, stay as they are."""
    parts = (text or "").split("\n\n")
    return "\n\n".join(part if "\n  " in part else textwrap.fill(part, 78) for part in parts)
