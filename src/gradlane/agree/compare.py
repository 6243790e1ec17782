"""What must be equal on all ranks, and what a rank objects to: all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import GradlaneError, InvalidValue, RanksDisagree, WrongState, WrongType
from .board import Document

KINDS: dict[str, type[GradlaneError]] = {
    kind.__name__: kind for kind in (InvalidValue, WrongState, WrongType)
}


def objection(*checks: Callable[[], None]) -> GradlaneError | None:
    """The error of the first check that raises an error of gradlane, or None."""
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
    return {"kind": kind, "message": str(error)}


def refuse_objections(notes: list[Document], mine: GradlaneError | None, doing: str) -> None:
    """Raise on every rank the objection of the first rank that has one; ``mine`` is this rank's own."""
    found = [(rank, note["objection"]) for rank, note in enumerate(notes) if note.get("objection")]
    if not found:
        return
    rank, first = found[0]
    everyone = len(found) == len(notes) and all(objection == first for _, objection in found)
    who = "" if everyone else f"rank {rank}: "
    raise KINDS.get(str(first["kind"]), WrongState)(f"{doing}: {who}{first['message']}") from mine


def refuse_differences(notes: list[Document], fields: tuple[str, ...], doing: str) -> None:
    """Raise on every rank, and name the first field in which a rank differs from rank 0."""
    for field in fields:
        for rank, note in enumerate(notes):
            if note.get(field) != notes[0].get(field):
                theirs, own = first_difference(notes[0].get(field), note.get(field))
                raise RanksDisagree(
                    f"{doing}: the ranks differ in {field}: rank 0 has {theirs}, rank {rank} has {own}; "
                    "make it the same on every rank"
                )


def first_difference(a: object, b: object) -> tuple[str, str]:
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b, strict=False):
            if x != y:
                return str(x), str(y)
        return f"{len(a)} entries", f"{len(b)} entries"
    return str(a), str(b)
