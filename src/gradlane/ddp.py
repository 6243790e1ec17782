"""``attach``: one strategy on one DDP model.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .attachment import Attachment
from .core.strategy import Strategy
from .errors import WrongState, WrongType
from .feed.loss_scale import Scaler
from .feed.nonfinite import Policy
from .feed.sharded_models import refuse_sharded
from .lane.base import completed_future
from .settings import settings_of
from .strategies.as_strategy import as_strategy
from .telemetry.sink import Observer


class _Port:
    """What DDP keeps for ever: a hook can be registered once, so this one is all it ever sees.

    It does not keep the attachment alive: DDP keeps this in C++, where Python's collector sees nothing, and
    an observer or a strategy may hold the model. The model itself keeps it, see ``KEPT``.
    """

    def __init__(self) -> None:
        self._attachment: weakref.ref[Attachment] | None = None

    @property
    def attachment(self) -> Attachment | None:
        return None if self._attachment is None else self._attachment()

    @attachment.setter
    def attachment(self, attachment: Attachment | None) -> None:
        self._attachment = None if attachment is None else weakref.ref(attachment)


KEPT = "_gradlane_attachment"
"""Where a model keeps what is attached to it, for those who do not."""


_ports: "weakref.WeakKeyDictionary[DistributedDataParallel, _Port]" = weakref.WeakKeyDictionary()


def gradlane_hook(state: _Port, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The one hook that ``attach`` registers."""
    if state.attachment is None:
        _raise_after_backward(
            WrongState("the attachment of this model was closed; attach again before you train on")
        )
        return completed_future(bucket.buffer())
    return state.attachment.reduce(bucket)


def _raise_after_backward(error: Exception) -> None:
    def complain() -> None:
        raise error

    engine = torch.autograd.Variable._execution_engine
    # Twice, so that it runs after DDP's own callback, which leaves the model usable.
    engine.queue_callback(lambda: engine.queue_callback(complain))


def attach(
    ddp: DistributedDataParallel,
    strategy: Strategy | str,
    *,
    observer: Observer | Iterable[Observer] | None = None,
    timeout: float | timedelta | None = None,
    ranks_per_node: int | None = None,
    nonfinite: Policy = "skip",
    scaler: Scaler | None = None,
    verify_every: int | None = None,
) -> Attachment:
    """Let a strategy carry the gradients of a DDP model, on the model's own process group.

    Call it on every rank, after DDP has wrapped the model and before the first backward. All ranks
    compare library version, strategy and options, world size and parameters; if anything differs
    all of them raise ``RanksDisagree`` and name it.

    Args:
        ddp: the ``DistributedDataParallel`` model.
        strategy: a strategy, or its text: ``"Cast(Mean(), bfloat16)"``. One that keeps something is for one
            model: it is refused while it works on another, and when it has another's memory in it.
        observer: called with an ``Event`` for every request, on the lane's thread; a sink such as
            ``JsonLines(path)``; or a list of them.
        timeout: seconds (or a ``timedelta``) after which a rank that does not answer is an error; by default
            what the process group itself waits for, 30 minutes if its user said nothing. A rank that is gone
            is noticed at once whatever it is, and one that is late is named in the log after 10 s. If it is
            shorter than an evaluation or a save on one rank, that ends the job.
        ranks_per_node: for ``over="node"`` and ``"cross"``; by default ranks with one host name.
        nonfinite: what to do in a step whose mean gradient has NaN or infinity in it. "skip": all ranks skip
            it, with a warning; memory is as before, and optimizers of torch leave this model alone; more than
            10 in a row raise. "raise": ``NonFinite`` on all ranks. "propagate": as plain DDP, nobody looks.
            The first two keep a second copy of what the strategy remembers, to go back to.
        scaler: the ``torch.amp.GradScaler`` of the loss, so that what is remembered is not in units of a
            scale that changes. Not needed for strategies that remember nothing.
        verify_every: compare a hash of the weights, and of what the strategy keeps alike on all ranks, every
            so many steps; ``RanksDisagree`` on all ranks names those that differ.
    """
    _check_model(ddp)
    strategy = as_strategy(strategy)
    port = _ports.get(ddp)
    if port is not None and port.attachment is not None:
        raise WrongState(
            "this model has an attachment already; use attachment.swap(strategy), or close() it first"
        )
    if port is None and ddp._comm_hooks:
        raise WrongState(
            f"DDP has the hook {ddp._comm_hooks[0][0].__qualname__!r} registered, and takes one for "
            "ever; build the DDP model anew, or do not register that hook"
        )
    settings = settings_of(observer, timeout, ranks_per_node, nonfinite, scaler, verify_every)
    _refuse_steps_in_backward(ddp)
    attachment = Attachment(ddp, strategy, settings)
    if port is None:
        port = _Port()
        try:
            ddp.register_comm_hook(port, gradlane_hook)
        except BaseException:
            attachment.close()
            raise
        _ports[ddp] = port
        # DDP looks for such optimizers in its first forward, and would register a hook of its own for them.
        _before_first_forward(ddp, _refuse_steps_in_backward)
    port.attachment = attachment
    vars(ddp)[KEPT] = attachment
    attachment.on_close = partial(_let_go, weakref.ref(ddp))
    return attachment


def _before_first_forward(ddp: torch.nn.Module, check: Callable[[torch.nn.Module], None]) -> None:
    def once(ddp: torch.nn.Module, _: object) -> None:
        check(ddp)
        handle.remove()

    handle = ddp.register_forward_pre_hook(once)


def _refuse_steps_in_backward(ddp: torch.nn.Module) -> None:
    for name, parameter in ddp.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise WrongState(
                f"{name} has an optimizer that steps in backward (_apply_optimizer_in_backward): DDP would "
                "take a hook of its own for it, and no other. Make the model without it, and call "
                "optimizer.step() after backward"
            )


def _let_go(ddp: "weakref.ref[DistributedDataParallel]") -> None:
    if (model := ddp()) is not None:
        _ports[model].attachment = None
        vars(model).pop(KEPT, None)


def _check_model(ddp: object) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise WrongState(
            "there is no process group; call torch.distributed.init_process_group first, then wrap "
            "the model in DistributedDataParallel, then attach"
        )
    if not isinstance(ddp, DistributedDataParallel):
        inner = getattr(ddp, "_orig_mod", None)
        if isinstance(inner, DistributedDataParallel):
            raise WrongType("attach to the DDP model itself, before or after torch.compile(ddp) took it")
        if isinstance(ddp, torch.nn.Module):
            refuse_sharded(
                ddp, "without FSDP, wrap it in DistributedDataParallel instead, and attach to that"
            )
        raise WrongType(
            f"attach needs a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first: "
            "ddp = DistributedDataParallel(model)"
        )
