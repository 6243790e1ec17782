"""Print the completion of a shell: verbs, options and files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .verb_parser import VerbParser

NAME = "completion"
HELP = "print the completion of bash, zsh or fish"
EXAMPLES = """\
  eval "$(gradlane completion bash)"   in ~/.bashrc
  eval "$(gradlane completion zsh)"    in ~/.zshrc, after compinit
  gradlane completion fish | source    in ~/.config/fish/config.fish"""
BASH = """\
_gradlane() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=""
  if [ "$COMP_CWORD" = 1 ]; then
    words="{verbs} --help --version"
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    [[ $word == -* ]] || words=${{words##*-- }}
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _gradlane gradlane
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    from .main import parser_and_verbs

    verbs = parser_and_verbs()[1]
    print(_fish(verbs) if options.shell == "fish" else _bash(verbs, options.shell), end="")
    return 0


def _bash(verbs: Mapping[str, VerbParser], shell: str) -> str:
    cases = "\n".join(
        f'      {name}) words="{" ".join(parser.options)} -- {" ".join(_choices(parser))}" ;;'
        for name, parser in verbs.items()
    )
    return (ZSH if shell == "zsh" else "") + BASH.format(verbs=" ".join(verbs), cases=cases)


def _fish(verbs: Mapping[str, VerbParser]) -> str:
    lines = []
    for name, parser in verbs.items():
        lines.append(f"complete -c gradlane -n __fish_use_subcommand -a {name} -d '{_quoted(parser)}'")
        for option in parser.options:
            lines.append(f"complete -c gradlane -n '__fish_seen_subcommand_from {name}' -l {option[2:]}")
    return "\n".join(lines) + "\n"


def _choices(parser: VerbParser) -> list[Any]:
    return [word for action in parser.actions if not action.option_strings for word in action.choices or ()]


def _quoted(parser: VerbParser) -> str:
    return (parser.description or "").split(".")[0].split("\n")[0].replace("'", "")
