"""Block codecs in Triton: one kernel encodes with the residual, one decodes the sum of all payloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.streams import on_device
from . import triton_launch, triton_state
from .block_form import NATURAL, ROTATE, STOCHASTIC, BlockForm
from .counter import Keys

ELEMENTS = 2048  # of one program, about
TOPS = {0: 127.0, 1: 7.0, 2: 1.0, 4: 448.0, 5: 57344.0}  # the largest code of each form


@dataclass(frozen=True)
class TritonBlocks:
    """The kernels of one codec. The bits are those of plain torch. Tensors may be fp32 or bfloat16."""

    form: BlockForm

    def encode(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, keys: Keys, payload: Payload
    ) -> bool:
        """The payload of flat + residual, and what that loses. True: what is lost is finite."""
        codes, sides = payload
        feedback = residual is not None and residual_out is not None
        before = flat if residual is None else residual
        after = flat if residual_out is None else residual_out
        rotate = bool(self.form.flags & ROTATE)
        triton_launch.launch(
            triton_state.kernels().blocks.encode, self._programs(flat.numel()),
            flat, before, after, codes, sides, flat.numel(), *_signed(keys), self._norm(),
            FORM=self.form.form, BITS=self.form.bits, TOP=TOPS.get(self.form.form, 0.0),
            STOCHASTIC=bool(self.form.flags & STOCHASTIC),
            ROTATE=rotate, FEEDBACK=feedback, **self.shape(),
            reads=(flat, before) if feedback else (flat,),
            writes=(codes, sides, after) if feedback else (codes, sides),
        )  # fmt: skip
        return feedback

    def decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, factor: float, add: bool
    ) -> None:
        """``out`` becomes the sum, in the order of the payloads, or that is added to it."""
        steps = _steps(payloads)
        if steps is not None:
            self._decode(payloads, keys, out, steps, factor, add)
            return
        if out.dtype != torch.float32:  # sums are not rounded on their way
            wide = out.to(torch.float32)
            self.decode(payloads, keys, wide, factor, add)
            out.copy_(wide)
            return
        by_scales, at_end = (1.0, factor) if self.form.form == NATURAL else (factor, 1.0)
        for number, (payload, own) in enumerate(zip(payloads, keys, strict=True)):
            self._decode([payload], [own], out, (-1, 0, 0), by_scales, add or number > 0)
        if at_end != 1.0:
            out.mul_(at_end)

    def _decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, steps: tuple[int, int, int],
        factor: float, add: bool,
    ) -> None:  # fmt: skip
        rotate = bool(self.form.flags & ROTATE)
        table = rotate and len(payloads) > 1
        codes, sides = payloads[0]
        parts = [part for payload in payloads for part in payload]
        numbers = _table(keys, out.device) if table else codes
        triton_launch.launch(
            triton_state.kernels().blocks.decode, self._programs(out.numel()),
            codes, sides, out, numbers, out.numel(), len(payloads), *steps, *_signed(keys[0]), factor,
            self._norm(), FORM=self.form.form, BITS=self.form.bits, ROTATE=rotate, TABLE=table, ADD=add,
            **self.shape(),
            reads=(*parts, *((numbers,) if table else ()), *((out,) if add else ())), writes=(out,),
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Columns of a block: the next power of two."""
        return 1 << (self.form.block - 1).bit_length()

    @property
    def rows(self) -> int:
        """Blocks of a program."""
        return max(1, ELEMENTS // self.width)

    def shape(self) -> dict[str, Any]:
        log = self.width.bit_length() - 1
        return {"BLOCK": self.form.block, "WIDTH": self.width, "ROWS": self.rows, "LOG": log}

    def _programs(self, numel: int) -> int:
        return -(-numel // (self.form.block * self.rows))

    def _norm(self) -> float:
        return 1.0 / math.sqrt(self.form.block)


def _signed(keys: Keys) -> tuple[int, int]:
    """As signed numbers of 32 bits: Triton compiles a kernel for each width of its arguments."""
    first, second = (key - (key >> 31 << 32) for key in keys)
    return first, second


def _table(keys: Sequence[Keys], device: torch.device) -> Tensor:
    return on_device(torch.tensor([_signed(pair) for pair in keys], dtype=torch.int32), device)


def _steps(payloads: Sequence[Payload]) -> tuple[int, int, int] | None:
    """The number of the payload with a hole behind it, and how many elements the codes, and the scales, of
    one payload are behind those of the one before. That is what a collective receives, perhaps without a
    rank's own. None: they lie in another way."""
    holes, steps = set(), []
    for parts in zip(*payloads, strict=True):
        apart = [after.data_ptr() - before.data_ptr() for before, after in pairwise(parts)] or [0]
        step, size = min(apart, key=abs), parts[0].element_size()
        wide = [number for number, distance in enumerate(apart) if distance != step]
        if len(wide) > 1 or step % size or any(apart[number] != 2 * step for number in wide):
            return None
        holes.add(wide[0] if wide else -1)
        steps.append(step // size)
    return (holes.pop(), steps[0], steps[1]) if len(holes) == 1 else None
