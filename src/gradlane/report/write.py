"""One self-contained HTML page from the JSON of ``gradlane bench`` and ``gradlane train``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import InvalidValue
from .arm_styles import ArmStyle, assign
from .bench_section import BenchSection, bench_section
from .documents import PHASES, Bench, Train
from .number_format import moment, setting
from .read import document_of, load
from .train_section import TrainSection, train_section

ENDINGS = {
    "complete": "complete: every arm was run",
    "budget": "stopped at its time budget: later steps are missing",
    "interrupted": "interrupted: later steps are missing",
}


@dataclass(frozen=True)
class Section:
    """One input file on the page."""

    anchor: str
    heading: str
    file: str
    when: str
    command: str
    ended: str
    ending: str
    made: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    bench: BenchSection | None
    train: TrainSection | None


def write_page(inputs: Sequence[Path], out: Path) -> None:
    """Write the page of these files; nothing is written if one of them cannot be read."""
    if not inputs:
        raise InvalidValue("no input; give one or more files of `gradlane bench` or `gradlane train`")
    if not out.parent.is_dir():
        raise InvalidValue(
            f"the folder {out.parent} of {out} does not exist; make it, or choose another file"
        )
    if any(out.exists() and path.exists() and out.samefile(path) for path in inputs):
        raise InvalidValue(f"{out} is an input and would be overwritten; choose another file for the page")
    _write(out, render([(path.name, load(path)) for path in inputs]))


def write_record_page(record: dict[str, Any], name: str, out: Path) -> None:
    """Write the page of a record that is in memory; ``name`` is that of its file."""
    _write(out, render([(name, document_of(record, name))]))


def _write(out: Path, page: str) -> None:
    out.write_text(page, encoding="utf-8", errors="replace")  # JSON can hold half a surrogate pair


def render(files: Sequence[tuple[str, Bench | Train]]) -> str:
    """The page of these documents, each with the name of its file, as text. It needs no other file."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    folder = resources.files(__package__)
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html.jinja", "page.css")}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    documents = [document for _, document in files]
    arms = assign(result.arm for document in documents for result in document.results)
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        sentence=" ".join(_sentence(document) for document in documents),
        sections=[_section(number, *file, arms) for number, file in enumerate(files, start=1)],
        phases=PHASES,
    )


def _section(number: int, file: str, document: Bench | Train, arms: Mapping[str, ArmStyle]) -> Section:
    is_bench, made = isinstance(document, Bench), dict(document.made)
    subject = setting(document.settings.get("model" if is_bench else "task"))
    return Section(
        anchor=f"file-{number}",
        heading=f"{'Time of a step' if is_bench else 'Training'}: {subject}",
        file=file,
        when=moment(str(made.pop("at", ""))),
        command=str(made.pop("command", "")),
        ended=document.ended,
        ending=ENDINGS.get(document.ended, document.ended or "not known"),
        made=[(key, setting(value)) for key, value in made.items()],
        settings=[(key, setting(value)) for key, value in document.settings.items()],
        bench=bench_section(document, arms) if isinstance(document, Bench) else None,
        train=train_section(document, arms) if isinstance(document, Train) else None,
    )


def _sentence(document: Bench | Train) -> str:
    arms = _count(len({result.arm for result in document.results}), "arm")
    if isinstance(document, Bench):
        links = list(dict.fromkeys(result.link for result in document.results))
        ranks = sorted({result.ranks for result in document.results})
        named = f"{_count(len(links), 'link')} ({', '.join(links)})" if len(links) > 1 else links[0]
        world = _count(ranks[0], "rank") if len(ranks) == 1 else f"{', '.join(map(str, ranks))} ranks"
        return f"One training step was timed for {arms} on {named}, with {world}."
    seeds = {len(result.seeds) for result in document.results if result.seeds}
    if not seeds:
        return f"Training was started for {arms} over {document.link.name}; no arm reached an evaluation."
    most = f"{'up to ' if len(seeds) > 1 else ''}{_count(max(seeds), 'seed')} each"
    return f"Training was compared for {arms} over {document.link.name}, with {most}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
