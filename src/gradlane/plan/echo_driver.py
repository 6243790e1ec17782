"""The echo driver: answers every request at once with copies of the own payload, and times the strategy.

So the work of a strategy can be timed for any number of ranks, in one process and without a network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.bucket import Bucket, Layout
from ..core.collectives import Kind, Note, Request, Scope, StepSum, check_parts
from ..core.message import message_of
from ..core.running import Driver, Running
from ..core.scopes import Scopes
from ..core.scratch import Scratch
from ..core.strategy import Reduced, Strategy, named_states
from ..kernels.finite import divided
from ..lane.finite_check import FiniteCheck
from .echo_answers import echoed, summed

MOST_ELSEWHERE = 1 << 28  # bytes; more than most caches hold


@dataclass
class EchoPhase:
    kind: Kind
    over: Scope
    payload_bytes: int
    encode_s: float
    after_all: bool
    dtype: str


@dataclass
class EchoBucket:
    phases: list[EchoPhase] = field(default_factory=list)
    decode_s: float = 0.0


class Echo(Driver[Running]):
    """One strategy on some buckets, of rank 0 in a world of any size."""

    def __init__(
        self,
        strategy: Strategy,
        layouts: Sequence[Layout],
        scopes: Scopes,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._strategy, self._layouts, self._scopes = strategy, layouts, scopes
        self._cpu = device.type == "cpu"
        self._check = FiniteCheck()
        self._check.on = True  # as in training: a result that is not known to be bounded is checked
        self._gradients = [
            torch.randn(sum(slot.numel for slot in layout), device=device).to(dtype) for layout in layouts
        ]
        self._flats = [torch.empty_like(gradient) for gradient in self._gradients]
        whole = sum(gradient.nbytes for gradient in self._gradients)
        self._elsewhere = torch.zeros(min(2 * whole, MOST_ELSEWHERE) if self._cpu else 0, dtype=torch.uint8)
        self._scratch = [Scratch() for _ in layouts]
        self._found: dict[int, EchoBucket] = {}
        self._spent = 0.0  # since the last request
        self._met = False
        for leaf in named_states(strategy):
            if hasattr(leaf.state, "undoable"):
                leaf.state.undoable = True  # as in training

    @torch.no_grad()
    def step(self, number: int) -> list[EchoBucket]:
        """One step; what each bucket asked for, and its times."""
        self._check.begin()
        self._found, self._met = {}, False
        buckets = []
        for index, (layout, gradient) in enumerate(zip(self._layouts, self._gradients, strict=True)):
            self._compute()
            flat = self._flats[index].copy_(gradient)  # as DDP fills a bucket
            bucket = Bucket(
                flat=flat, layout=layout, step=number, rank=self._scopes.rank, world=self._scopes.world,
                index=index, is_last=index == len(self._layouts) - 1, sizes=self._scopes.sizes,
                places=self._scopes.places, scratch=self._scratch[index],
            )  # fmt: skip
            self._found[index] = EchoBucket()
            running = _Timed(self._strategy, bucket, _ignore, self)
            buckets.append(running)
            running.resume()
            self.advance(running)
        self._met = True
        self.meet(buckets)
        for leaf in named_states(self._strategy):
            if hasattr(leaf.state, "keep"):
                leaf.state.keep()
        return [self._found[index] for index in range(len(self._layouts))]

    def _compute(self) -> None:
        """Forward and backward read weights and write gradients, and so drive residuals out of the caches."""
        self._elsewhere.add_(1)

    def perform(self, running: Running, request: Request) -> object:
        size = self._scopes.sizes[request.over]
        check_parts(request, size)
        began = self.clock()
        if request.kind in ("all_reduce", "reduce_scatter"):
            if request.op == "mean":  # the lane divides, and looks whether the tensor is bounded
                bounded = divided(request.payloads[0][0], running.bucket.divisor(request.over))
                running.bounded_answer = request.payloads[0][0] if bounded else None
        else:
            for payload in request.payloads:
                message_of(payload)
        spent = self._take() + self.clock() - began
        _, payload_bytes = request.size()
        self._found[running.bucket.index].phases.append(
            EchoPhase(request.kind, request.over, payload_bytes, spent, self._met, _dtype(request))
        )
        answer = echoed(request, size, self._scopes.places[request.over])
        if request.kind == "reduce_scatter":
            began = self.clock()
            answer = summed(answer)
            self.add(self.clock() - began)
        return answer

    def finished(self, running: Running, reduced: Reduced) -> None:
        began = self.clock()
        self._check.add(running.strategy, running.bucket, reduced)
        self._found[running.bucket.index].decode_s = self._take() + self.clock() - began

    def clock(self) -> float:
        """Seconds of this process' work: others that compete for the cores do not count."""
        if self._cpu:
            return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        torch.accelerator.synchronize()
        return time.perf_counter()

    def add(self, seconds: float) -> None:
        self._spent += seconds

    def _take(self) -> float:
        spent, self._spent = self._spent, 0.0
        return spent


class _Timed(Running):
    def __init__(self, strategy: Strategy, bucket: Bucket, take_note: object, echo: Echo) -> None:
        super().__init__(strategy, bucket, _ignore)
        self._echo = echo

    def resume(self, answer: object = None) -> Request | StepSum | Reduced:
        began = self._echo.clock()
        try:
            return super().resume(answer)
        finally:
            self._echo.add(self._echo.clock() - began)


def _dtype(request: Request) -> str:
    return str(request.tensors[0].dtype).removeprefix("torch.") if request.tensors else "float32"


def _ignore(bucket: Bucket, note: Note) -> None:
    """Figures of a strategy; here they mean nothing."""
