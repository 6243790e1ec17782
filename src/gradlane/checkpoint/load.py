"""``Attachment.load``: all ranks read and check first. If one refuses, all do, and nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..agree.board import Board, Document
from ..agree.compare import first_difference, refuse_differences
from ..core.strategy import Leaf, named_states, parts
from ..core.world_change import Carried, Fitting, Slots
from ..errors import InvalidValue, RanksDisagree
from ..log import log
from ..strategies.text import saved_by
from .files import Files
from .folder import checkpoints_in
from .manifest import Manifest
from .save import common_token
from .subject import Layout, Subject, slots_of
from .together import all_leave, attempted, first_failure, nothing, patient
from .tree import part_at, with_part


class Loaded(NamedTuple):
    step: int
    layout: Layout
    totals: Mapping[str, float]
    """What this rank had counted; nothing if the number of ranks has changed."""


class Taken(NamedTuple):
    left_out: list[str]
    totals: Mapping[str, float]


def load(board: Board, path: Path, subject: Subject, strict: bool) -> Loaded:
    manifest = _chosen(board, path, strict)
    before = subject.strategy.state_dict()
    taken: list[Taken] = []
    done = False
    try:
        mine, error = attempted(nothing(lambda: taken.append(_take(board, path, manifest, subject, strict))))
        size = max(file.size for file in manifest.files) * (1 + manifest.world // board.world)
        _, notes = patient(board, size).agree("load/taken", mine, doing="load")
        _refuse_all_if_one(notes, path, error)
        done = True
    finally:
        if not done:
            subject.strategy.load_state_dict(before)
    for part in taken[0].left_out:
        log.warning("load: left out %s", part)
    return Loaded(manifest.step, manifest.layout, taken[0].totals)


def _chosen(board: Board, path: Path, strict: bool) -> Manifest:
    """The newest checkpoint that all ranks see."""
    found: list[Manifest] = []

    def find() -> Document:
        found.extend(checkpoints_in(path))
        return {"tokens": [manifest.token for manifest in found], "steps": [m.step for m in found]}

    mine, error = attempted(find)
    _, notes = board.agree("load/found", {**mine, "strict": strict}, doing="load")
    try:
        refuse_differences(notes, ("strict",), "load")
        _refuse_all_if_one(notes, path, error)
        token = _token(path, notes)
    except (InvalidValue, RanksDisagree):
        all_leave(board, "load")
        raise
    return next(manifest for manifest in found if manifest.token == token)


def _token(path: Path, notes: Sequence[Document]) -> str:
    token = common_token([note["tokens"] for note in notes])
    if token is None:
        seen = {rank: note["steps"] for rank, note in enumerate(notes)}
        raise InvalidValue(
            f"the ranks see different checkpoints in {path}, of the steps {seen}; give all ranks the same one"
        )
    return token


def _refuse_all_if_one(notes: Sequence[Document], path: Path, error: BaseException | None) -> None:
    if (failure := first_failure(list(notes))) is not None:
        raise InvalidValue(
            f"rank {failure[0]} cannot load {path}: {failure[1]} [no rank has loaded anything]"
        ) from error


def _take(board: Board, path: Path, manifest: Manifest, subject: Subject, strict: bool) -> Taken:
    """Load the state of this rank."""
    strategy, same_world = subject.strategy, manifest.world == board.world
    if strict:
        _refuse_other_run(manifest, subject)
    leaves = list(named_states(strategy))
    files = Files(
        path,
        manifest,
        into=None if strict else [x for x in leaves if same_world or isinstance(x.state, Carried)],
    )
    state = dict(files[board.rank]) if same_world else strategy.carried(files, board.rank, board.world)
    totals = files.totals(board.rank) if same_world else {}
    slots = slots_of(subject.parameters)
    fitting, wrong = fitting_of(leaves, state, slots)
    if wrong and same_world and any(part.uses_nodes for part in parts(strategy)):  # other nodes, maybe
        state = strategy.carried(files, board.rank, board.world)
        fitting, wrong = fitting_of(leaves, state, slots)
    if strict:
        if wrong:
            raise InvalidValue(f"{in_short(wrong)}; strict=False leaves out what does not fit")
        strategy.load_state_dict(state)
        return Taken([], totals)
    return Taken(files.left_out + wrong + _load_fitting(leaves, fitting), totals)


def _refuse_other_run(manifest: Manifest, subject: Subject) -> None:
    if not saved_by(subject.strategy, manifest.strategy):
        way = "start with the strategy that saved it and swap() afterwards"
        if subject.strategy.takes == "weights":  # swap changes what is inside of LocalSteps
            way = "call local_steps with the same options"
        raise InvalidValue(
            f"it was saved by {manifest.strategy}, this run has {subject.text}; {way}, or load with "
            "strict=False to keep the parts that fit"
        )
    saved, own = list(map(str, manifest.parameters)), list(map(str, subject.parameters))
    if saved != own:
        there, here = first_difference(saved, own)
        raise InvalidValue(
            f"it was saved with another model: it has {there}, this model has {here}; load it with the same "
            "model, or with strict=False to keep the parts that fit"
        )
    known = {parameter.name for parameter in subject.parameters}
    for bucket in manifest.layout:
        if unknown := [name for name in bucket if name not in known]:
            raise InvalidValue(f"its buckets hold {unknown[0]!r}, which is not a parameter; it is damaged")


def in_short(wrong: Sequence[str]) -> str:
    return f"{wrong[0]}, and {len(wrong) - 1} more" if len(wrong) > 1 else wrong[0]


def fitting_of(leaves: Sequence[Leaf], state: Mapping[str, Any], slots: Slots) -> Fitting:
    """The part of a state that fits this strategy on this model, and why other parts do not."""
    fitting: dict[str, Any] = {}
    wrong: list[str] = []
    for leaf in leaves:
        part, objections = leaf.fitting(part_at(state, leaf.path), slots)
        wrong += [f"{leaf.owner}: {objection}" for objection in objections]
        with_part(fitting, leaf.path, part)
    return fitting, wrong


def _load_fitting(leaves: Sequence[Leaf], state: Mapping[str, Any]) -> list[str]:
    left_out = []
    for leaf in leaves:
        part = part_at(state, leaf.path)
        try:
            leaf.state.load_state_dict(part)
        except InvalidValue as error:
            if part:  # an empty part: it has no state, and refuses that
                left_out.append(f"{leaf.owner}: {error}")
    return left_out
