"""Who reduces gradients beside local steps, and until when."""

from __future__ import annotations

import weakref

from torch.nn.parallel import DistributedDataParallel

from ..errors import WrongState
from .base import Session
from .own_loop import OwnLoop


class GradientExchange:
    """Who reduces gradients: in the warm-up, and afterwards where ``keep`` says so."""

    def __init__(self, ddp: DistributedDataParallel | None, session: Session | None, keep: bool) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._ddp_settings: tuple[bool, bool] | None = None
        self._session = session
        self._keep = keep
        self._ddp_reduces = ddp is not None and session is None
        self._bytes = 0.0  # of a session that was closed

    def reduce(self, closure: bool) -> None:
        """Before ``optimizer.step()``, of a model without DDP."""
        if not isinstance(self._session, OwnLoop):
            return
        if closure:
            raise WrongState(
                "optimizer.step(closure) computes gradients when it is too late to average them; run "
                "backward before optimizer.step(), wrap the model in DDP, or leave out warmup= and inside="
            )
        self._session.reduce()

    def stop(self) -> None:
        """In local training nobody needs the mean, and DDP's broadcast would undo each rank's buffers. Call
        it again if a framework has switched them on."""
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None:
            if self._ddp_settings is None:
                self._ddp_settings = ddp.require_backward_grad_sync, ddp.broadcast_buffers
            ddp.broadcast_buffers = False
            ddp.require_backward_grad_sync &= self._keep
        if not self._keep:
            self._end_session()

    def bytes_wire(self, of_ddp: float) -> float:
        """Sent for gradients; ``of_ddp`` if DDP reduced them."""
        if self._session is not None:
            return self._session.metrics()["comm/bytes_wire"]
        return of_ddp if self._ddp_reduces else self._bytes

    def close(self) -> None:
        self._end_session()
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and self._ddp_settings is not None:
            ddp.require_backward_grad_sync, ddp.broadcast_buffers = self._ddp_settings
            self._ddp_settings = None

    def _end_session(self) -> None:
        if self._session is not None:
            self._bytes = self._session.metrics()["comm/bytes_wire"]
            self._session.close()
            self._session = None
