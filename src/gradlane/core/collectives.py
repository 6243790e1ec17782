"""The requests a strategy may await. Nothing here communicates: whoever drives the coroutine does."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongType

Payload = tuple[Tensor, ...]
Kind = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]
Op = Literal["mean", "sum", "min", "max"]
Scope = Literal["world", "node", "cross"]

OPS = ("mean", "sum", "min", "max")
SUMS = ("mean", "sum")
SCOPES = ("world", "node", "cross")
REDUCIBLE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64})


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One collective that a strategy awaits and that is not yet performed."""

    kind: Kind
    payloads: tuple[Payload, ...]
    """One payload; for ``all_to_all`` one per destination."""
    op: Op | None
    over: Scope
    exact: bool = False
    """The payload decides something, it is not a gradient: a ``Cast`` outside does not narrow it."""

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for payload in self.payloads for tensor in payload)

    def size(self) -> tuple[int, int]:
        """Elements and bytes of all payloads together; of a sparse tensor, its indices and values."""
        elements = payload = 0
        for part in self.payloads:
            for tensor in part:
                for stored in _stored(tensor) if tensor.is_sparse else (tensor,):
                    count = stored.numel()
                    elements += count
                    payload += count * stored.element_size()
        return elements, payload

    def __str__(self) -> str:
        what = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self.tensors
        )
        op = f" {self.op}" if self.op else ""
        scope = "" if self.over == "world" else f" over {self.over}"
        return f"{self.kind}{op}({what}){scope}"


@dataclass(frozen=True, slots=True)
class Note:
    """Figures for the metrics; needs no network."""

    figures: dict[str, Tensor | float]

    def __await__(self) -> Generator[Note, Any, None]:
        yield self


@dataclass(frozen=True, slots=True, eq=False)
class StepSum:
    """One bucket's part of a sum over all buckets of the step; needs no network."""

    tensor: Tensor
    of: object = None

    def __await__(self) -> Generator[StepSum, Tensor, Tensor]:
        return (yield self)


async def all_reduce(
    tensor: Tensor, *, op: Op = "mean", over: Scope = "world", exact: bool = False
) -> Tensor:
    """Combine one tensor over all ranks; the answer has its shape and dtype, bit-equal on every rank.

    The tensor is no longer yours: the answer may be written into it. A mean divides before it adds, as DDP
    does. ``exact``: no ``Cast`` outside may narrow it.
    """
    _check_reducible(tensor, op, "all_reduce")
    if not tensor.is_sparse:
        tensor = tensor.contiguous()
    return cast(Tensor, await Request("all_reduce", ((tensor,),), op, _scope(over), exact))


async def all_gather(payload: Payload, *, over: Scope = "world") -> list[Payload]:
    """Every rank's payload, in rank order. Shapes and dtypes must be the same on every rank.

    The answer is yours until the step ends, also to overwrite. The next step receives into the same buffers,
    so clone what you keep. This rank's own part in it is the payload that you passed.
    """
    return cast(
        "list[Payload]",
        await Request("all_gather", (_payload(payload, "all_gather"),), None, _scope(over)),
    )


async def all_to_all(payloads: Sequence[Payload], *, over: Scope = "world") -> list[Payload]:
    """Send ``payloads[d]`` to rank d; the answer holds what each rank sent to this one.

    What goes to rank d must have the same shapes on every rank; what goes to another may have others. As with
    ``all_gather`` the answer is yours until the step ends.
    """
    checked = tuple(_payload(payload, "all_to_all") for payload in payloads)
    return cast("list[Payload]", await Request("all_to_all", checked, None, _scope(over)))


async def reduce_scatter(
    tensor: Tensor, *, op: Op = "mean", over: Scope = "world", exact: bool = False
) -> Tensor:
    """This rank's part of a sum or mean: ``tensor`` holds one part for each rank, one after the other.

    Half of an ``all_reduce``; an ``all_gather`` of the answers is the other half. The answer is one row of
    elements, and yours. Otherwise as ``all_reduce``, but that sums in a half-width format round once.
    """
    _check_reducible(tensor, op, "reduce_scatter")
    if op not in SUMS:
        raise InvalidValue(f"reduce_scatter of op={op!r} is not possible; use 'mean' or 'sum'")
    if tensor.is_sparse:
        raise WrongType("reduce_scatter cannot carry a sparse tensor; use all_reduce")
    request = Request("reduce_scatter", ((tensor.contiguous().view(-1),),), op, _scope(over), exact)
    return cast(Tensor, await request)


async def step_sum(tensor: Tensor, *, of: object = None) -> Tensor:
    """The sum of this tensor over all buckets of the step that ask for it, on this rank.

    A strategy sees one bucket at a time; this tells it something about the complete gradient, such as its
    norm. All buckets that ask wait for the step's last bucket, so what follows cannot overlap with backward.
    What was awaited before can. Every bucket gets the same tensor: do not overwrite it. ``of`` says whose sum
    it is (``of=self``): then two strategies in one step, whose sums do not belong together, are refused.
    """
    if not isinstance(tensor, Tensor):
        raise WrongType(f"step_sum takes a tensor, got {type(tensor).__name__}")
    return await StepSum(tensor, of)


async def note(**figures: Tensor | float) -> None:
    """Add figures to the metrics, summed by name: ``await note(overflow=count)`` -> ``comm/overflow``.

    A name that ends in ``_square`` is summed over the buckets of a step and shown as its root:
    ``await note(residual_square=x.dot(x))`` -> ``comm/residual_norm`` of the last step.
    """
    await Note(dict(figures))


def _check_reducible(tensor: Tensor, op: Op, caller: str) -> None:
    if not isinstance(tensor, Tensor):
        raise WrongType(f"{caller} takes a tensor, got {type(tensor).__name__}")
    if op not in OPS:
        raise InvalidValue(f"op={op!r} is not known; use one of {', '.join(OPS)}")
    if tensor.dtype not in REDUCIBLE:
        raise InvalidValue(
            f"{caller} of {tensor.dtype} is not possible (8-bit integers wrap, float8, bool and "
            "complex are refused by the backends); widen it first, or all_gather it"
        )
    if op == "mean" and not tensor.is_floating_point():
        raise InvalidValue(f"the mean of {tensor.dtype} would be cut off; use op='sum' and divide")


def check_parts(request: Request, size: int) -> None:
    """Refuse a request that does not have one part for each of ``size`` ranks."""
    if request.kind == "all_to_all" and len(request.payloads) != size:
        raise InvalidValue(
            f"all_to_all over {request.over} needs one payload for each of {size} ranks, "
            f"got {len(request.payloads)}"
        )
    if request.kind == "reduce_scatter" and (numel := request.payloads[0][0].numel()) % size:
        raise InvalidValue(
            f"reduce_scatter over {request.over} needs equal parts for {size} ranks, got {numel} elements; "
            "pad them with zeros"
        )


def _scope(over: Scope) -> Scope:
    if over not in SCOPES:
        raise InvalidValue(f"over={over!r} is not known; use one of {', '.join(SCOPES)}")
    return over


def _payload(payload: Payload, caller: str) -> Payload:
    if not isinstance(payload, tuple) or not all(isinstance(part, Tensor) for part in payload):
        raise WrongType(
            f"{caller} carries tuples of tensors, got {type(payload).__name__}; "
            "write (tensor,) for a single one"
        )
    if any(part.is_sparse for part in payload):
        raise WrongType(f"{caller} cannot carry a sparse tensor; send its indices and values")
    return tuple(part.contiguous() for part in payload)


def _stored(sparse: Tensor) -> tuple[Tensor, Tensor]:
    coalesced = sparse.coalesce()
    return coalesced.indices(), coalesced.values()
