"""Whether kernels in Triton have the bits of plain torch on a device: asked before they are used there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import message_size, payload_in
from .block_form import Blocks, PlainBlocks
from .counter import keys_of

BLOCKS = 8
LEAST = 4096  # elements: several programs
TAIL = 37
KEYS = [keys_of(seed) for seed in (1, 2, 3)]
FACTOR = 1 / 3


def same_bits(own: Blocks, plain: PlainBlocks, block: int, device: torch.device) -> bool:
    """Encode and decode small odd inputs with both. The host waits for the device, once."""
    numel = max(LEAST, BLOCKS * block)
    flags = _narrow_flags(own, plain, block, numel, device)
    for count in (numel, numel - block + TAIL):
        flags += _flags(own, plain, block, count, device)
    return bool(torch.stack(flags).all())


def _narrow_flags(
    own: Blocks, plain: PlainBlocks, block: int, numel: int, device: torch.device
) -> list[Tensor]:
    """All in bfloat16, as the codec does it in plain torch: converted on the way in and out."""
    gradient, residual = (part.to(device, torch.bfloat16) for part in odd_input(numel, block))
    payloads = [_payload(plain, numel, device) for _ in range(2)]
    wide, narrow = gradient.float(), [torch.empty_like(residual), gradient.clone()]
    own.encode(gradient, residual, narrow[0], KEYS[0], payloads[0])
    plain.encode(wide, residual.float(), wide, KEYS[0], payloads[1])
    own.decode(payloads[:1], KEYS[:1], narrow[1], 1.0, True)
    total = gradient.float()
    plain.decode(payloads[1:], KEYS[:1], total, 1.0, True)
    expected = wide.to(torch.bfloat16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), total.to(torch.bfloat16)
    pairs = [*zip(narrow, expected, strict=True), *zip(*payloads, strict=True)]
    return [equal_bits(*pair) for pair in pairs]


def _flags(own: Blocks, plain: PlainBlocks, block: int, numel: int, device: torch.device) -> list[Tensor]:
    gradient, residual = (part.to(device) for part in odd_input(numel, block))
    payloads, flags = _received(plain, numel, device), []
    for n, (seed, kept) in enumerate(zip(KEYS, (residual, None, residual), strict=True)):
        outs = [None if kept is None else torch.empty_like(kept) for _ in range(2)]
        other = _payload(plain, numel, device)
        is_finite = own.encode(gradient, kept, outs[0], seed, other)
        plain.encode(gradient, kept, outs[1], seed, payloads[n])
        flags += [equal_bits(*pair) for pair in zip(other, payloads[n], strict=True)]
        if outs[0] is not None and outs[1] is not None:
            if is_finite:
                outs[1].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            flags.append(equal_bits(outs[0], outs[1]))
    turned = [payloads[1], payloads[0], payloads[2]]  # not one behind the other
    for many, add in ((payloads, False), (payloads[:1], False), (payloads[:1], True), (turned, False)):
        factor = FACTOR if len(many) > 1 else 1.0
        totals = [gradient.clone() for _ in range(2)]
        for blocks, total in zip((own, plain), totals, strict=True):
            blocks.decode(many, KEYS[: len(many)], total, factor, add)
        flags.append(equal_bits(*totals))
    return flags


def odd_input(numel: int, block: int) -> tuple[Tensor, Tensor]:
    """A gradient and a residual, on the CPU: numbers of all sizes, and of each eight blocks one of zeros, one
    with a NaN, one with an infinity, one that overflows, one of halves, one tiny, one of denormals."""
    generator = torch.Generator().manual_seed(numel)
    gradient = torch.randn(numel, generator=generator)
    gradient *= torch.rand(numel, generator=generator).pow_(8).mul_(3.0)
    residual = torch.randn(numel, generator=generator).mul_(0.1)
    for start in range(0, numel, BLOCKS * block):
        parts = [part[start : start + BLOCKS * block] for part in (gradient, residual)]
        for part in parts:
            part[:block] = 0.0
            part[4 * block : 5 * block].mul_(4.0).round_().div_(4.0)
            part[5 * block : 6 * block] *= 1e-33
            part[6 * block : 7 * block] *= 1e-41
        mine, kept = parts
        for where, value in ((block + 3, torch.nan), (2 * block + 5, torch.inf), (3 * block + 7, 3e38)):
            mine[where : where + 1] = value
        kept[3 * block + 7 : 3 * block + 8] = 3e38
        kept[: block // 2] = -0.0
        mine[: block // 2] = -0.0
    return gradient, residual


def equal_bits(own: Tensor, other: Tensor) -> Tensor:
    """One NaN is like another. The answer stays on the device."""
    if not own.is_floating_point():
        return (own == other).all()
    bits = torch.int32 if own.dtype == torch.float32 else torch.int16
    return ((own.view(bits) == other.view(bits)) | (own.isnan() & other.isnan())).all()


def _payload(plain: PlainBlocks, numel: int, device: torch.device) -> Payload:
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in plain.layout(numel))


def _received(plain: PlainBlocks, numel: int, device: torch.device) -> list[Payload]:
    """Payloads in rows of one tensor, as a collective receives them."""
    layout = plain.layout(numel)
    size = -(-message_size(layout) // 16) * 16
    rows = torch.zeros(len(KEYS), size, dtype=torch.uint8, device=device)
    return [payload_in(row, layout) for row in rows]
