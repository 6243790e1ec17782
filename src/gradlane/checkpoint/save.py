"""``Attachment.save``: every rank its file, then one manifest, which is the moment that counts."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from ..core.across import Fits
from ..core.strategy import named_states
from ..errors import InvalidValue, NotSaved, RanksDisagree
from ..lane.agree import Board, Document
from ..lane.open import refuse_differences
from .folder import checkpoints_in, clean, commit, remove, write_whole
from .manifest import FORMAT, file_name, manifest_of
from .rankfile import Receipt, write
from .subject import Subject, slots_of
from .together import all_leave, attempted, first_failure, nothing, patient
from .tree import part_at


def save(board: Board, path: Path, subject: Subject) -> None:
    """All ranks together. Until rank 0 has put the manifest in its place the old checkpoint is in force, and
    its files are removed only when all ranks see the new one."""
    layout = sha256(repr(subject.layout).encode()).hexdigest()
    same = {"step": subject.step, "strategy": subject.text, "layout": layout}
    token, notes = board.agree("save/begin", {**same, "has": _tokens(path)}, doing="save")
    try:
        refuse_differences(notes, tuple(same), "save")
    except RanksDisagree:
        all_leave(board, "save")
        raise
    keep = common_token([note["has"] for note in notes])
    name = file_name(board.rank, board.world, token)

    mine, error = attempted(lambda: _write_own(path, name, token, board, subject))
    notes = _agreed(board, "written", mine, error, path, name)
    manifest = manifest_of(subject, token, [Receipt(note["size"], note["sha256"]) for note in notes])

    if board.rank == 0:
        mine, error = attempted(nothing(lambda: commit(path, manifest, keep)))
    _agreed(board, "committed", mine, error, path, name)

    # Who does not see it has a disk of its own, and writes the same bytes there.
    mine, error = attempted(nothing(lambda: commit(path, manifest, keep)))
    _agreed(board, "seen", mine, error, path, None)
    clean(path, manifest)


def _write_own(path: Path, name: str, token: str, board: Board, subject: Subject) -> Document:
    state = subject.strategy.state_dict()
    slots, parts = slots_of(subject.parameters), list(named_states(subject.strategy))
    for leaf in parts:
        if isinstance(leaf.state, Fits) and (
            wrong := leaf.state.fitting(part_at(state, leaf.path), slots)[1]
        ):
            raise InvalidValue(f"{leaf.owner}: {wrong[0]}; it could not be loaded again")
    head = {
        "format": FORMAT,
        "token": token,
        "rank": board.rank,
        "world": board.world,
        "parts": [[list(leaf.path), leaf.owner] for leaf in parts],
    }
    path.mkdir(parents=True, exist_ok=True)
    return write_whole(path, name, lambda file: write(file, head, state))._asdict()


def _agreed(
    board: Board, what: str, mine: Document, error: BaseException | None, path: Path, name: str | None
) -> list[Document]:
    size = int(mine.get("size", 0))
    _, notes = patient(board, size).agree(f"save/{what}", mine, doing="save")
    if (failure := first_failure(notes)) is not None:
        if name is not None:
            remove(path, [name])
        raise NotSaved(
            f"rank {failure[0]} could not save to {path}: {failure[1]}; nothing was saved, and a checkpoint "
            "that was there before is as it was"
        ) from error
    return notes


def _tokens(path: Path) -> list[str]:
    try:
        return [manifest.token for manifest in checkpoints_in(path)]
    except InvalidValue:
        return []


def common_token(has: list[list[str]]) -> str | None:
    """The newest checkpoint that all ranks see; rank 0 is the first to see one."""
    return next((token for token in has[0] if all(token in tokens for tokens in has)), None)
