"""Fabric: ``attach_fabric`` after ``fabric.setup``. Import it from ``integrations.lightning``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.strategy import Strategy
from ..errors import WrongType
from ..session import Session
from ..session.one_process import OneProcess
from ..settings import Options
from ..strategies.as_strategy import as_strategy
from ..torch_internals import uncompiled
from .models import is_fsdp2, needs_another
from .one_process import reduce_after_backward
from .with_optimizer import attach_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

GIVE = "attach_fabric(fabric, module, strategy, optimizer=optimizer)"


def attach_fabric(
    fabric: Fabric,
    module: object,
    strategy: Strategy | str,
    *,
    optimizer: object | None = None,
    **options: Unpack[Options],
) -> Session:
    """``gradlane.attach`` for a module that ``fabric.setup`` has returned; the options are the same.

    The scaler is that of Fabric's precision. With one device and no DDP the strategy runs on one rank, at the
    end of ``fabric.backward``. ``LocalSteps(...)`` and 1-bit Adam need ``optimizer``, as ``fabric.setup`` has
    returned it.
    """
    if not isinstance(module, _FabricModule):
        raise WrongType(
            f"got a {type(module).__name__} that Fabric has not set up; call module = fabric.setup(module) "
            "first, and pass what it returned"
        )
    inner: nn.Module = module._forward_module
    sharded = is_fsdp2(inner)
    model = inner if sharded else uncompiled(inner)  # a compiled module holds the one that has the gradients
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if not (
        sharded
        or isinstance(model, DistributedDataParallel)
        or isinstance(fabric.strategy, SingleDeviceStrategy)
    ):
        raise WrongType(needs_another("Fabric", type(fabric.strategy).__name__))

    def alone(strategy: Strategy) -> Session:
        session = OneProcess(model, strategy, scaler=scaler, **options)
        accumulating = _Accumulating(fabric, module)
        reduce_after_backward(fabric, session, lambda: not accumulating.now)
        return session

    return attach_for(
        model, as_strategy(strategy), optimizer, attach_alone=alone, give=GIVE, scaler=scaler, **options
    )  # fmt: skip


class _Accumulating:
    """Tracks whether ``fabric.no_backward_sync(module)`` is active. Without DDP it has no effect."""

    def __init__(self, fabric: Any, module: object) -> None:
        self.now = False
        no_backward_sync = fabric.no_backward_sync

        @wraps(no_backward_sync)
        @contextmanager
        def tracked(of: object, enabled: bool = True) -> Iterator[None]:
            before, self.now = self.now, enabled if of is module else self.now
            try:
                with no_backward_sync(of, enabled):
                    yield
            finally:
                self.now = before

        fabric.no_backward_sync = tracked
