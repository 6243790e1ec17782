"""Which kernels do the work of a block codec: C on the CPU, Triton on CUDA, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.collectives import Payload
from . import triton_state
from .block_form import NATURAL, BlockForm, Blocks, PlainBlocks
from .counter import Keys
from .native import Native, native
from .triton_blocks import TritonBlocks
from .triton_check import same_bits


def blocks_for(form: BlockForm, plain: PlainBlocks, tensor: Tensor) -> Blocks:
    """What encodes and decodes tensors like this one, fp32 and contiguous. Of other classes than torch's own,
    such as fake tensors, some have no memory."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return plain
    if tensor.device.type == "cpu":
        library = native()
        return plain if library is None else CBlocks(library, form)
    return blocks_on(form, plain, tensor.device)


def blocks_on(form: BlockForm, plain: PlainBlocks, device: torch.device) -> Blocks:
    """On another device than the CPU. Before Triton is used there for the first time its bits are checked,
    and the host waits for that; ``Codec.prepare`` does it when a model is attached."""
    if triton_state.why_not(device) is not None:
        return plain
    own = TritonBlocks(form)
    if triton_state.trusts(plain.name, device, lambda: same_bits(own, plain, form.block, device)):
        return Guarded(own, plain)
    return plain


@dataclass(frozen=True)
class Guarded:
    """Triton; plain torch from the first call that fails. It takes bfloat16 as it is."""

    own: TritonBlocks
    plain: PlainBlocks

    def encode(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, keys: Keys, payload: Payload
    ) -> bool:
        given = flat, residual, residual_out, keys, payload
        if triton_state.attempt(self.plain.name, flat.device, lambda: self.own.encode(*given)):
            return residual is not None
        wide = None if residual_out is None else residual_out.to(torch.float32)
        self.plain.encode(flat.float(), None if residual is None else residual.float(), wide, keys, payload)
        if residual_out is not None and wide is not None and wide is not residual_out:
            residual_out.copy_(wide)
        return False

    def decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, factor: float, add: bool
    ) -> None:
        given = payloads, keys, out, factor, add
        if not triton_state.attempt(self.plain.name, out.device, lambda: self.own.decode(*given)):
            wide = out.to(torch.float32)
            self.plain.decode(payloads, keys, wide, factor, add)
            if wide is not out:
                out.copy_(wide)


@dataclass(frozen=True)
class CBlocks:
    """The compiled kernels."""

    library: Native
    form: BlockForm

    def encode(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, keys: Keys, payload: Payload
    ) -> bool:
        form, flags, block, _ = self.form
        self.library.encode_blocks(form, flags, flat, residual, residual_out, block, keys, *payload)
        return False

    def decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, factor: float, add: bool
    ) -> None:
        form, flags, block, _ = self.form
        if add or (len(payloads) == 1 and factor == 1.0):
            ((codes, side),), (own,) = payloads, keys
            self.library.decode_blocks(form, flags, codes, side, block, own, out, add=add)
            return
        self.library.decode_many(form, flags, payloads, block, keys, out, factor)
        if form == NATURAL and factor != 1.0:  # it has no scales to multiply
            out.mul_(factor)
