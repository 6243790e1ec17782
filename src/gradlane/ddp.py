"""``attach``: one strategy on one model, of DDP or of FSDP2.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .core.strategy import Strategy
from .errors import InvalidValue, WrongState, WrongType
from .feed.sharded_models import refuse_dtensors, refuse_fsdp1
from .fsdp_internals import param_groups
from .lane.base import completed_future
from .session.attachment import Attachment
from .session.sharded import ShardedAttachment
from .settings import ScaledOptions, Settings
from .strategies.as_strategy import as_strategy
from .strategies.auto.strategy import Auto
from .torch_internals import (
    call_after_backward,
    has_python_reducer,
    registered_hook,
    steps_in_backward,
    uncompiled,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class _Port:
    """The state of the one hook that DDP accepts, for as long as the model exists.

    It does not keep the attachment alive: DDP holds this object in C++, where Python's collector sees
    nothing, and an observer or a strategy may refer to the model. The model keeps the attachment (``KEPT``).
    """

    def __init__(self) -> None:
        self._attachment: weakref.ref[Attachment] | None = None
        self.registered = False
        """Whether DDP calls the hook; ``Auto`` begins without."""

    @property
    def attachment(self) -> Attachment | None:
        return None if self._attachment is None else self._attachment()

    @attachment.setter
    def attachment(self, attachment: Attachment | None) -> None:
        self._attachment = None if attachment is None else weakref.ref(attachment)


KEPT = "_gradlane_attachment"
"""The attribute of a model that keeps its attachment alive, for users who do not."""


_ports: "weakref.WeakKeyDictionary[DistributedDataParallel, _Port]" = weakref.WeakKeyDictionary()


def gradlane_hook(state: _Port, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The one hook that ``attach`` registers."""
    if state.attachment is None:
        _raise_after_backward(
            WrongState("the attachment of this model is closed; attach again before you continue to train")
        )
        return completed_future(bucket.buffer())
    return state.attachment.feed.reduce(bucket, state.attachment.strategy)


def _raise_after_backward(error: Exception) -> None:
    def raise_it() -> None:
        raise error

    # Queued twice, so that it runs after DDP's own callback, and the model stays usable.
    call_after_backward(lambda: call_after_backward(raise_it))


@overload
def attach(
    model: DistributedDataParallel, strategy: Strategy | str, **options: "Unpack[ScaledOptions]"
) -> Attachment: ...
@overload
def attach(
    model: torch.nn.Module, strategy: Strategy | str, **options: "Unpack[ScaledOptions]"
) -> Attachment | ShardedAttachment: ...
def attach(
    model: torch.nn.Module, strategy: Strategy | str, **options: "Unpack[ScaledOptions]"
) -> Attachment | ShardedAttachment:
    """Let a strategy reduce the gradients of a DDP model, on the model's own process group; or those of a
    model of FSDP2.

    Call it on every rank, after DDP has wrapped the model and before the first backward. All ranks
    compare library version, strategy and options, world size and parameters; if anything differs
    all of them raise ``RanksDisagree`` and name it.

    Args:
        model: a ``DistributedDataParallel`` model, or one that ``fully_shard`` or ``replicate`` has prepared.
            With replicas (a mesh of two dimensions) the strategy carries each rank's shard across them. On a
            mesh of one dimension ``fully_shard`` has none: then the strategy is its reduce-scatter.
        strategy: a strategy, or its text: ``"Cast(Mean(), bfloat16)"``. A strategy with memory is for one
            model: it is refused while it works on another one, and when it has another one's memory.
        observer: called with an ``Event`` for every request, on the lane's thread; a sink such as
            ``JsonLines(path)``; or a list of them. Default: None.
        timeout: seconds (or a ``timedelta``) after which a rank that does not answer is an error. Default:
            the timeout of the process group, which is 30 minutes unless its user chose another one. A rank
            that has ended is noticed at once, and a rank that is late is named in the log after 10 s. A
            timeout shorter than an evaluation or a save on one rank ends the job.
        ranks_per_node: for ``over="node"`` and ``"cross"``. Default: the ranks with the same host name.
        nonfinite: what to do in a step whose mean gradient has NaN or infinity in it. "skip", the default:
            all ranks skip it, with a warning; memory is as before, and torch's optimizers leave this model
            alone; more than 10 skips in a row raise. "raise": all ranks raise ``NonFinite``. "propagate": no
            rank checks, as in plain DDP. The first two keep a second copy of the memory, to undo a step.
        scaler: the ``torch.amp.GradScaler`` of the loss, so that memory does not depend on a scale that
            changes. Strategies without memory do not need it. Default: None.
        verify_every: compare a hash of the weights, and of the state that is the same on all ranks, every so
            many steps; if they differ all ranks raise ``RanksDisagree`` and name the ranks. Default: never.
    """
    _check_process_group()
    strategy = as_strategy(strategy)
    if isinstance(model, torch.nn.Module) and param_groups(model):
        return _attach_sharded(model, strategy, Settings(**options))
    return _attach_ddp(_checked_model(model), strategy, Settings(**options))


def _attach_ddp(ddp: DistributedDataParallel, strategy: Strategy, settings: Settings) -> Attachment:
    port = _ports.get(ddp)
    if port is not None and port.attachment is not None:
        raise _attached_already()
    if port is None and (hook := registered_hook(ddp)) is not None:
        raise WrongState(
            f"DDP has the hook {hook!r} registered, and accepts one hook in its "
            "life; wrap the model in DDP again, or do not register that hook"
        )
    _refuse_steps_in_backward(ddp)
    attachment = Attachment(ddp, strategy, settings)
    try:
        if port is None:
            # DDP searches for such optimizers in its first forward, and registers a hook of its own for them.
            _before_first_forward(ddp, _refuse_steps_in_backward)
            port = _ports[ddp] = _Port()
        if not port.registered and not attachment.begin_without_hook(
            ddp, partial(_register, weakref.ref(ddp))
        ):
            _register(weakref.ref(ddp))
    except BaseException:
        _ports.pop(ddp, None)
        attachment.close()
        raise
    port.attachment = attachment
    vars(ddp)[KEPT] = attachment
    attachment.on_close = partial(_detach, weakref.ref(ddp))
    return attachment


def _register(model: "weakref.ref[DistributedDataParallel]") -> None:
    if (ddp := model()) is not None:
        if (hook := registered_hook(ddp)) is not None:
            raise WrongState(
                f"DDP has the hook {hook!r} registered since Auto was attached, and accepts one; wrap the "
                "model in DDP again, and do not register that hook"
            )
        ddp.register_comm_hook(_ports[ddp], gradlane_hook)
        _ports[ddp].registered = True


def _before_first_forward(ddp: torch.nn.Module, check: Callable[[torch.nn.Module], None]) -> None:
    def once(ddp: torch.nn.Module, _: object) -> None:
        check(ddp)
        handle.remove()

    handle = ddp.register_forward_pre_hook(once)


def _refuse_steps_in_backward(ddp: torch.nn.Module) -> None:
    for name, parameter in ddp.named_parameters():
        if steps_in_backward(parameter):
            raise WrongState(
                f"{name} has an optimizer that steps in backward (_apply_optimizer_in_backward): DDP "
                "registers a hook of its own for it, and accepts no other. Make the model without it, and "
                "call optimizer.step() after backward"
            )


def _detach(ddp: "weakref.ref[DistributedDataParallel]") -> None:
    if (model := ddp()) is not None:
        _ports[model].attachment = None  # without a hook, DDP goes on as if nothing had been attached
        _forget(weakref.ref(model))


def _attach_sharded(model: torch.nn.Module, strategy: Strategy, settings: Settings) -> ShardedAttachment:
    inner = uncompiled(model)
    if vars(inner).get(KEPT) is not None:
        raise _attached_already()
    if isinstance(strategy, Auto):
        raise InvalidValue(
            "Auto chooses for DDP models and for loops without DDP, not for FSDP2; attach a strategy: "
            "'ErrorFeedback(Sharded(Int4()))' on a mesh with replicas, 'Sharded(Int8())' on one without"
        )
    attachment = ShardedAttachment(model, strategy, settings)
    vars(inner)[KEPT] = attachment
    attachment.on_close = partial(_forget, weakref.ref(inner))
    return attachment


def _forget(model: "weakref.ref[torch.nn.Module]") -> None:
    if (found := model()) is not None:
        vars(found).pop(KEPT, None)


def _attached_already() -> WrongState:
    return WrongState(
        "this model has an attachment already; use attachment.swap(strategy), or close() it first"
    )


def _check_process_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise WrongState(
            "there is no process group; call torch.distributed.init_process_group first, then wrap "
            "the model in DistributedDataParallel, then attach"
        )


def _checked_model(ddp: object) -> DistributedDataParallel:
    if not isinstance(ddp, DistributedDataParallel):
        if isinstance(uncompiled(ddp), DistributedDataParallel):
            raise WrongType("attach to the DDP model itself, before or after torch.compile(ddp) took it")
        if isinstance(ddp, torch.nn.Module):
            refuse_fsdp1(ddp)
            refuse_dtensors(
                ddp,
                "wrap it in DistributedDataParallel(model, device_mesh=mesh['dp']) or prepare it by "
                "replicate() of FSDP2, and attach to that; or call reduce_gradients(model, strategy, "
                "group=mesh['dp'].get_group())",
            )
        raise WrongType(
            f"attach needs a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first: "
            "ddp = DistributedDataParallel(model)"
        )
    if has_python_reducer(ddp):
        raise InvalidValue(
            "with torch._dynamo.config.optimize_ddp='python_reducer' a hook gets single gradients in place "
            "of DDP's buckets; set it to 'ddp_optimizer', its default, before the model is wrapped"
        )
    return ddp
