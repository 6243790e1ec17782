"""Before moments are frozen, all ranks compare them: what differs then would differ for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from ..agree.board import Board, Document
from ..agree.compare import as_note, objection, refuse_differences, refuse_objections
from ..errors import InvalidValue, RanksDisagree, WrongState
from ..feed.adam_moments import betas_of, check_adam, check_decay, moments, unusable
from ..feed.drift import hashed
from ..strategies.shared_momentum import SharedMomentum

Names = Mapping[Tensor, str]
DOING = "freeze_moments"


class MomentsAgreement:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._count = 0

    def agree(
        self, optimizer: Optimizer, names: Names, shared: SharedMomentum, step: int, joined: bool
    ) -> None:
        """Collective. If a rank objects, or its moments are not those of the others, all ranks raise."""
        against = objection(
            lambda: _check_joined(joined, step),
            lambda: check_optimizer(optimizer, names),
            lambda: _check_moments(optimizer, names, shared, step),
        )
        own: Document = {"step": step, "objection": as_note(against)}
        own["moments"] = {} if against else dict(_hashes(optimizer, names))
        _, notes = self._board.agree(f"freeze{self._count}", own, doing=DOING)
        self._count += 1
        refuse_objections(notes, against, DOING)
        refuse_differences(notes, ("step",), DOING)
        _refuse_other_moments(notes, step)


def check_optimizer(optimizer: Optimizer, names: Names) -> None:
    """Refuse an optimizer that cannot work with momentum that arrives, or that is not for this model."""
    check_adam(optimizer)
    check_decay(optimizer)
    own = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    for p, name in names.items():
        if p.requires_grad and p not in own:
            raise InvalidValue(
                f"{name} is not in this optimizer, and what arrives for it would be a momentum; use one "
                "optimizer for all parameters of the model, with a group for each kind"
            )
    for p in own:
        if p not in names:
            raise InvalidValue(
                f"the optimizer has a parameter of shape {list(p.shape)} whose gradient this attachment does "
                "not reduce; make an optimizer for each attached model"
            )


def _check_joined(joined: bool, step: int) -> None:
    if joined:
        raise WrongState(
            f"the moments are to be frozen before step {step}, and this rank ran out of data (join()) and "
            "has stopped to step: its moments are older; freeze earlier, after=, or give all ranks as many "
            "batches"
        )


def _check_moments(optimizer: Optimizer, names: Names, shared: SharedMomentum, step: int) -> None:
    found = list(moments(optimizer))
    if not any(float(state["step"]) for _, _, state in found):
        raise WrongState(
            f"the optimizer has made no step yet, and step {step} is to use its moments: let Adam warm up "
            "for some steps first, a tenth of the training say: after="
        )
    for group, p, _ in found:
        beta, expected = betas_of(group)[0], shared.beta_of(names[p])
        if beta != expected:
            raise WrongState(
                f"beta1 of {names[p]} is {beta} now, and was {expected} when freeze_moments was called; "
                "leave it as it is: OneCycleLR(..., cycle_momentum=False)"
            )
    for p, why in unusable(optimizer):
        raise WrongState(f"the second moment of {names[p]} {why}")


def _hashes(optimizer: Optimizer, names: Names) -> Iterator[tuple[str, list[object]]]:
    for _, p, state in moments(optimizer):
        yield names[p], [float(state["step"]), *(hashed(state[key]) for key in ("exp_avg_sq", "exp_avg"))]


def _refuse_other_moments(notes: list[Document], step: int) -> None:
    first = notes[0]["moments"]
    for rank, note in enumerate(notes):
        own = note["moments"]
        if own == first:
            continue
        name = next(name for name in [*first, *own] if first.get(name) != own.get(name))
        pairs = zip(("step", "exp_avg_sq", "exp_avg"), first.get(name, []), own.get(name, []), strict=False)
        what = next((key for key, a, b in pairs if a != b), "state")
        raise RanksDisagree(
            f"{DOING}: before step {step} the optimizer's {what} of {name} on rank {rank} is not that of "
            "rank 0; nothing is frozen. Load one checkpoint of the optimizer on all ranks, and look for code "
            "that steps, or changes gradients, on some ranks only"
        )
