"""One self-contained HTML page from the JSON of ``gradlane bench``, ``gradlane train``, ``gradlane plan``."""

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
from .documents import PHASES, Bench, Plan, Train
from .number_format import moment, setting
from .plan_section import PlanSection, plan_section
from .read import Document, document_of, load
from .train_section import TrainSection, train_section
from .verdict import verdict

PARTS = ("page.html.jinja", "page.css", "page.js")
ENDINGS = {
    "complete": "complete: every arm was run",
    "budget": "stopped at its time budget: later steps are missing",
    "interrupted": "interrupted: later steps are missing",
}


@dataclass(frozen=True)
class Section:
    """One input on the page; ``file`` is empty if it is in no file."""

    anchor: str
    heading: str
    verdict: Sequence[str]
    about: str
    file: str
    when: str
    command: str
    ended: str
    ending: str
    made: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]
    bench: BenchSection | None
    train: TrainSection | None
    plan: PlanSection | None


def write_page(inputs: Sequence[Path], out: Path) -> dict[str, list[str]]:
    """Write the page of these files, and return what each says in words.

    Nothing is written if one of them cannot be read.
    """
    if not inputs:
        raise InvalidValue(
            "no input; give one or more files of `gradlane bench`, `gradlane train` or `gradlane plan`"
        )
    if not out.parent.is_dir():
        raise InvalidValue(
            f"the folder {out.parent} of {out} does not exist; make it, or choose another file"
        )
    if any(out.exists() and path.exists() and out.samefile(path) for path in inputs):
        raise InvalidValue(f"{out} is an input and would be overwritten; choose another file for the page")
    documents = [(path, load(path)) for path in inputs]
    _write(out, render([(path.name, document) for path, document in documents]))
    return {str(path): verdict(document) for path, document in documents}


def write_record_page(record: dict[str, Any], file: Path | None, out: Path) -> None:
    """Write the page of a record that is in memory; ``file`` is where it was written, if it was."""
    _write(out, render([(file.name if file else "", document_of(record, "this run"))]))


def _write(out: Path, page: str) -> None:
    out.write_text(page, encoding="utf-8", errors="replace")  # JSON can hold half a surrogate pair


def render(files: Sequence[tuple[str, Document]]) -> str:
    """The page of these documents, each with the name of its file or "", as text. It needs no other file."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    folder = resources.files(__package__)
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in PARTS}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    documents = [document for _, document in files]
    arms = assign(result.arm for document in documents for result in document.results)
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        sections=[_section(number, *file, arms) for number, file in enumerate(files, start=1)],
        phases=PHASES,
    )


def _code(text: str) -> Any:
    """What is in backticks, as code. Everything is escaped."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them stands alone
        return escape(text)
    marked = (
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts)
    )
    return Markup("").join(marked)


def _section(number: int, file: str, document: Document, arms: Mapping[str, ArmStyle]) -> Section:
    made = dict(document.made)
    subject = setting(document.settings.get("task" if isinstance(document, Train) else "model"))
    about = {Bench: "Time of a step", Train: "Training", Plan: "Plan"}[type(document)]
    return Section(
        anchor=f"file-{number}",
        heading=f"{about}: {subject}",
        verdict=verdict(document),
        about=_sentence(document),
        file=file,
        when=moment(str(made.pop("at", ""))),
        command=str(made.pop("command", "")),
        ended=document.ended,
        ending=ENDINGS.get(document.ended, document.ended or "not known"),
        made=[(key, setting(value)) for key, value in made.items()],
        settings=[(key, setting(value)) for key, value in document.settings.items()],
        bench=bench_section(document, arms) if isinstance(document, Bench) else None,
        train=train_section(document, arms) if isinstance(document, Train) else None,
        plan=plan_section(document, arms) if isinstance(document, Plan) else None,
    )


def _sentence(document: Document) -> str:
    arms = _count(len({result.arm for result in document.results}), "arm")
    if isinstance(document, Bench):
        links = list(dict.fromkeys(result.link for result in document.results))
        ranks = sorted({result.ranks for result in document.results})
        named = f"{_count(len(links), 'link')} ({', '.join(links)})" if len(links) > 1 else links[0]
        world = _count(ranks[0], "rank") if len(ranks) == 1 else f"{', '.join(map(str, ranks))} ranks"
        return f"One training step was timed for {arms} on {named}, with {world}."
    if isinstance(document, Plan):
        return f"One training step was predicted for {arms}, with {_count(document.ranks, 'rank')}."
    seeds = {len(result.seeds) for result in document.results if result.seeds}
    if not seeds:
        return f"Training was started for {arms} over {document.link.name}; no arm reached an evaluation."
    most = f"{'up to ' if len(seeds) > 1 else ''}{_count(max(seeds), 'seed')} each"
    return f"Training was compared for {arms} over {document.link.name}, with {most}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
