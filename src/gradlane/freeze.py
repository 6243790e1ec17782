"""``freeze_moments``: Adam with a frozen second moment, so that its momentum can travel in one bit."""

from __future__ import annotations

import glob
import weakref
from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from .agree.compare import objection
from .core.numbers import is_whole
from .core.strategy import Strategy
from .errors import InvalidValue, WrongType
from .feed.adam_moments import betas_of
from .session.base import Session
from .session.freezing import Freezing
from .session.frozen_moments import freeze_now
from .session.moments_agreement import check_optimizer
from .session.sharded import ShardedAttachment
from .strategies.as_strategy import as_strategy
from .strategies.checks import refuse_memory_in_warm_up
from .strategies.schedule import After
from .strategies.shared_momentum import Beta, SharedMomentum

THEN = "ErrorFeedback(Sharded(Sign()))"

_freezing: weakref.WeakKeyDictionary[Optimizer, Freezing] = weakref.WeakKeyDictionary()


def freeze_moments(
    optimizer: Optimizer,
    attachment: Session | None = None,
    *,
    after: int | None = None,
    then: Strategy | str = THEN,
    refresh: int | None = None,
) -> None:
    """Freeze Adam's second moment after a warm-up, and let its momentum travel compressed: 1-bit Adam.

    Tang et al., 2021. The first ``after`` steps are Adam's own, with the strategy that is attached. Before
    step ``after`` all ranks compare their moments, bit for bit, and freeze the second one. From then on the
    ranks send momentum by ``SharedMomentum(then)``, and the optimizer does theta -= lr m / (sqrt(v) + eps)
    with what arrives. Learning rates, schedules and AdamW's decay stay in the optimizer, and are not sent.

    Call it once, on every rank, after ``attach`` and before a checkpoint is loaded; a script that resumes
    makes the same call. All ranks compare the arguments and the optimizer's betas, and raise if they differ.
    That the moments are frozen is part of ``optimizer.state_dict()``: save it with the attachment.

    Without an attachment the second moment is frozen at once, and the optimizer keeps its momentum.
    ``local_steps(..., moments="frozen")`` does that at the end of its warm-up.

    Elements that have never had a gradient stay where they are, but for AdamW's decay.

    Args:
        optimizer: ``torch.optim.Adam`` or ``AdamW``, with all parameters of the model. Others are refused,
            and so are Adam's ``weight_decay`` (use AdamW), ``capturable`` and ``differentiable``.
        attachment: what ``attach``, ``attach_without_ddp`` or ``reduce_gradients`` returned. Its strategy is
            that of the warm-up, and has no memory: ``Mean()``, or ``Sharded(Int8())``.
        after: how many steps of warm-up, as ``attachment.step`` counts them; a tenth of the training or more.
        then: what carries the momentum. Quantisers are good at it, low rank and top-k are not.
        refresh: let the second moment follow in rare steps, as 0/1 Adam does (Lu et al., 2022): ``After``
            says in which. They use the strategy of the warm-up. The paper has 16. Default: never.
    """
    if attachment is None:
        if after is not None or refresh is not None or then != THEN:
            raise InvalidValue(
                "after=, then= and refresh= need the attachment whose gradients the optimizer uses; write "
                "freeze_moments(optimizer, attachment, after=60), or freeze_moments(optimizer) to freeze now"
            )
        freeze_now(optimizer)
        return
    if not isinstance(attachment, Session):
        raise WrongType(
            f"got a {type(attachment).__name__} as attachment; pass what attach or attach_without_ddp "
            "returned"
        )
    if attachment.gives != "gradients":
        raise WrongType(
            "local steps send no gradients, so no momentum can travel in their place; freeze the second "
            "moment alone: local_steps(..., warmup=60, moments='frozen')"
        )
    if isinstance(attachment, ShardedAttachment):
        raise WrongType(
            "freeze_moments compares the moments of full copies, and with FSDP each rank has a part of the "
            "model; use DDP, or go on with Adam's own moments and a strategy that reduces gradients"
        )
    _freeze_later(optimizer, attachment, after, then, refresh)


def _freeze_later(
    optimizer: Optimizer, session: Session, after: object, then: Strategy | str, refresh: object
) -> None:
    made: list[tuple[After, SharedMomentum]] = []
    names = {p: name for name, p in session._replicated().items()}
    against = objection(
        lambda: check_optimizer(optimizer, names),
        lambda: made.append(_strategy(optimizer, names, session.strategy, after, then, refresh)),
    )
    betas = [] if against else [list(betas_of(group)) for group in optimizer.param_groups]
    strategy = made[0][0] if made else session.strategy
    session._swap_to(strategy, doing="freeze_moments", against=against, also={"betas": betas})
    for old in (session._freezing, _freezing.get(optimizer)):
        if old is not None:
            old.close()
    session._freezing = _freezing[optimizer] = Freezing(optimizer, session, *made[0])


def _strategy(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    first: Strategy,
    after: object,
    then: Strategy | str,
    refresh: object,
) -> tuple[After, SharedMomentum]:
    if not is_whole(after) or after < 1:
        raise InvalidValue(
            f"after={after!r}; use a whole number of warm-up steps from 1 up, a tenth of the training say"
        )
    if refresh is not None and not is_whole(refresh):
        raise InvalidValue(f"refresh={refresh!r} is not possible; use a whole number from 1 up, or None")
    if isinstance(first, After) and isinstance(first.then, SharedMomentum):  # an earlier call has made it
        first = first.first
    refuse_memory_in_warm_up(first)
    shared = SharedMomentum(as_strategy(then), _beta(optimizer, names))
    return After(after, shared, first, refresh), shared


def _beta(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Beta:
    """Of all parameters; by name if groups differ, as few names as possible."""
    by_name = {names[p]: betas_of(group)[0] for group in optimizer.param_groups for p in group["params"]}
    usual = Counter(by_name.values()).most_common(1)[0][0]
    others = {glob.escape(name): beta for name, beta in by_name.items() if beta != usual}
    return {**others, "*": usual} if others else usual
