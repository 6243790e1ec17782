"""The report of a run, in Markdown."""

from pathlib import Path

TITLE = "# gradlane: a first run on GPUs\n"
AFTER = """
Please open an issue with this page, whether all is well or not: it is the first thing that is known about
gradlane on such a machine.
"""


def write(path, environment, world, results, times):
    """``results``: (check, verdict, words of each rank)."""
    lines = [TITLE, f"{world} ranks.", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    lines += ["", "| check | | |", "|---|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {verdict} | {_cell(words)} |" for name, verdict, words in results
    ]
    if times:
        lines += ["", "| strategy | ms a step | MiB more than DDP | times fewer bytes |", "|---|---|---|---|"]
        lines += [f"| `{text}` | {ms:.1f} | {more:.0f} | {ratio:.2f} |" for text, ms, more, ratio in times]
    Path(path).write_text("\n".join([*lines, AFTER]))


def _cell(words):
    """All ranks' words; one of them where they are the same."""
    distinct = list(dict.fromkeys(words))
    text = distinct[0] if len(distinct) == 1 else "; ".join(f"rank {r}: {w}" for r, w in enumerate(words))
    return text.replace("|", "/").replace("\n", " ")[:1000]
