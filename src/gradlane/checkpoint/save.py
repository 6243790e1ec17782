"""``Attachment.save``: every rank writes its file; then one manifest makes them the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ..agree.board import Board, Document
from ..agree.compare import as_note, objection, refuse_differences, refuse_objections
from ..core.strategy import named_states
from ..core.unsaved_state import refuse_unsaved_state
from ..errors import GradlaneError, InvalidValue, NotSaved
from .folder import checkpoints_in, clean, commit, remove, write_atomically
from .manifest import FORMAT, file_name, manifest_of
from .rankfile import Receipt, write
from .subject import Layout, Subject, slots_of
from .together import all_leave, attempted, first_failure, nothing, patient
from .tree import part_at


def save(board: Board, path: Path, subject: Subject, layout: Callable[[], Layout]) -> None:
    """All ranks call it together. ``layout`` is called when all have come: it may be a collective.

    The old checkpoint is the current one until rank 0 has renamed the manifest. Its files are removed when
    all ranks see the new one.
    """
    same = {"step": subject.step, "strategy": subject.text}
    against = objection(lambda: refuse_unsaved_state(subject.strategy))
    own = {"has": _tokens(path), "objection": as_note(against)}
    token, notes = board.agree("save/begin", {**same, **own}, doing="save")
    try:
        refuse_objections(notes, against, "save")
        refuse_differences(notes, tuple(same), "save")
    except GradlaneError:
        all_leave(board, "save")
        raise
    keep = common_token([note["has"] for note in notes])
    name = file_name(board.rank, board.world, token)
    subject = replace(subject, layout=layout())
    board = patient(board, subject.largest_file())

    mine, error = attempted(lambda: _write_own(path, name, token, board, subject))
    notes = _agreed(board, "written", mine, error, path, name)
    manifest = manifest_of(subject, token, [Receipt(note["size"], note["sha256"]) for note in notes])

    mine, error = attempted(nothing(lambda: board.rank == 0 and commit(path, manifest, keep)))
    _agreed(
        board, "committed", mine, error, path
    )  # from here on the files may be the current checkpoint: they stay

    # A rank that does not see it has its own disk, and writes the same bytes there.
    mine, error = attempted(nothing(lambda: commit(path, manifest, keep)))
    _agreed(board, "seen", mine, error, path)
    clean(path, manifest)


def _write_own(path: Path, name: str, token: str, board: Board, subject: Subject) -> Document:
    state = subject.strategy.state_dict()
    slots, parts = slots_of(subject.parameters), list(named_states(subject.strategy))
    for leaf in parts:
        if wrong := leaf.fitting(part_at(state, leaf.path), slots)[1]:
            raise InvalidValue(f"{leaf.owner}: {wrong[0]}; it could not be loaded again")
    head = {
        "format": FORMAT,
        "token": token,
        "rank": board.rank,
        "world": board.world,
        "parts": [[list(leaf.path), leaf.owner] for leaf in parts],
        "totals": dict(subject.totals),
    }
    path.mkdir(parents=True, exist_ok=True)
    buckets = sha256(repr(subject.layout).encode()).hexdigest()
    return {
        "layout": buckets,
        **write_atomically(path, name, lambda file: write(file, head, state))._asdict(),
    }


def _agreed(
    board: Board, what: str, mine: Document, error: BaseException | None, path: Path, name: str | None = None
) -> list[Document]:
    _, notes = board.agree(f"save/{what}", mine, doing="save")
    failure = first_failure(notes) or _odd_one(notes)
    if failure is None:
        return notes
    outcome = "a complete checkpoint is there, this one or the one before"
    if name is not None:
        remove(path, [name])
        outcome = "nothing was saved, and an earlier checkpoint is unchanged"
    raise NotSaved(f"rank {failure[0]} could not save to {path}: {failure[1]}; {outcome}") from error


def _odd_one(notes: list[Document]) -> tuple[int, str] | None:
    for rank, note in enumerate(notes):
        if note.get("layout") != notes[0].get("layout"):
            return rank, "its buckets differ from those of rank 0"
    return None


def _tokens(path: Path) -> list[str]:
    try:
        return [manifest.token for manifest in checkpoints_in(path)]
    except InvalidValue:
        return []


def common_token(tokens_by_rank: list[list[str]]) -> str | None:
    """The token of the newest checkpoint that all ranks see. Rank 0 is the first to see a new one."""
    return next(
        (token for token in tokens_by_rank[0] if all(token in tokens for tokens in tokens_by_rank)), None
    )
