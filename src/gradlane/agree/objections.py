"""What one rank has against going on is raised by all."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import GradlaneError, InvalidValue, WrongState, WrongType
from .board import Document

KINDS: dict[str, type[GradlaneError]] = {
    kind.__name__: kind for kind in (InvalidValue, WrongState, WrongType)
}


def objection(*checks: Callable[[], None]) -> GradlaneError | None:
    """The error of the first check that raises one of ours."""
    for check in checks:
        try:
            check()
        except (InvalidValue, WrongState, WrongType) as error:
            return error
    return None


def as_note(error: GradlaneError | None) -> Document | None:
    if error is None:
        return None
    kind = next(name for name, known in KINDS.items() if isinstance(error, known))
    return {"kind": kind, "told": str(error)}


def refuse_objections(notes: list[Document], mine: GradlaneError | None, doing: str) -> None:
    """Raise on every rank what the first rank that objects has to say; ``mine`` is this rank's own."""
    said = [(rank, note["objection"]) for rank, note in enumerate(notes) if note.get("objection")]
    if not said:
        return
    rank, first = said[0]
    everyone = len(said) == len(notes) and all(told == first for _, told in said)
    who = "" if everyone else f"rank {rank}: "
    raise KINDS.get(str(first["kind"]), WrongState)(f"{doing}: {who}{first['told']}") from mine
