"""Compiles all kernels in Triton for several GPUs, without one: ``python -m tests.gpu.compiled``."""

import json
import re
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradlane.codecs.blockwise import BlockCodec
from gradlane.kernels.block_form import ROTATE, STOCHASTIC
from gradlane.kernels.elementwise import ELEMENTS
from gradlane.kernels.gpu import blocks, elementwise, lowrank, topk
from gradlane.kernels.triton_blocks import TOPS, TritonBlocks
from gradlane.kernels.triton_launch import OPTIONS
from gradlane.kernels.triton_lowrank import ROWS, WIDTH
from gradlane.kernels.triton_topk import DIGITS, SPAN
from gradlane.kernels.triton_topk import ELEMENTS as OF_TOPK

from ..support.codecs import CODECS

ARCHITECTURES = (80, 90, 100)
INEXACT = r"\b(?:fma|div\.full|[\w.]*approx|[\w.]*ftz)[\w.]*"
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8"}
ARGUMENTS = {
    **dict.fromkeys(("gradient", "residual", "residual_out", "out", "square"), "*fp32"),
    **dict.fromkeys(("total", "p", "q", "flat"), "*fp32"),
    **dict.fromkeys(("rows", "columns", "slots", "start"), "i32"),
    **dict.fromkeys(("histogram", "facts", "ends"), "*i32"), "indices": "*i16",
    **dict.fromkeys(("numel", "count", "hole", "code_stride", "side_stride", "key0", "key1"), "i32"),
    **dict.fromkeys(("factor", "norm", "limit"), "fp32"),
    "codes": "*u8", "keys": "*i32", "wide": "*fp32",
}  # fmt: skip
ALIGNED = ("numel", "code_stride", "side_stride", "rows", "columns")


def variants():
    """(kernel, types of some arguments, constants) of everything that is ever launched."""
    for dtype in ("*fp32", "*bf16"):
        yield elementwise.drop_huge, {"residual": dtype}, {"ELEMENTS": ELEMENTS}
    for dtype in ("*fp16", "*bf16"):
        yield elementwise.count_overflow, {"narrow": dtype, "count": "*i32"}, {"ELEMENTS": ELEMENTS}
    for rank in (1, 2, 3, 4, 16):
        tile = {"RANK": rank, "ROWS": ROWS, "WIDTH": WIDTH}
        yield lowrank.expand, {}, tile
        yield lowrank.sum_rows, {}, {**tile, "PADDED": 1 << (rank - 1).bit_length()}
        for dtype in ("*fp32", "*bf16"):
            yield lowrank.subtract, {"residual": dtype, "residual_out": dtype}, tile
    yield from _of_topk()
    for codec in CODECS.values():
        if isinstance(codec, BlockCodec):
            yield from _of(codec)


def _of_topk():
    whole = {"ELEMENTS": OF_TOPK}
    for number, (shift, bins) in enumerate(DIGITS):
        fixed = {**whole, "SHIFT": shift, "BINS": bins}
        if number:
            yield topk.count_digit, {}, fixed
        else:
            yield from ((topk.sum_and_count, {}, {**fixed, "SUM": both}) for both in (False, True))
    yield topk.count_reached, {"counts": "*i32"}, whole
    for dtype, subtract in product(("*fp32", "*bf16"), (False, True)):
        yield topk.take, {"values": dtype, "counts": "*i32"}, {**whole, "SUBTRACT": subtract, "SPAN": SPAN}


def _of(codec):
    form = codec.block_form
    rotate, types = bool(form.flags & ROTATE), {"sides": TYPES[codec.layout(8)[1][1]]}
    fixed = {"FORM": form.form, "BITS": form.bits, "ROTATE": rotate, **TritonBlocks(form).shape()}
    stochastic, top = bool(form.flags & STOCHASTIC), TOPS.get(form.form, 0.0)
    for feedback in (False, True):
        yield blocks.encode, types, {**fixed, "TOP": top, "STOCHASTIC": stochastic, "FEEDBACK": feedback}
    half = {**types, **dict.fromkeys(("gradient", "residual", "residual_out", "out"), "*bf16")}
    yield blocks.encode, half, {**fixed, "TOP": top, "STOCHASTIC": stochastic, "FEEDBACK": True}
    yield blocks.decode, half, {**fixed, "ADD": True, "TABLE": False}
    for add, table in product((False, True), {False, rotate}):
        yield blocks.decode, types, {**fixed, "ADD": add, "TABLE": table}


def ptx_of(kernel, types, fixed, architecture, aligned):
    """The machine code's text; ``aligned``: as for addresses and sizes that are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else {**ARGUMENTS, **types}[name] for name in names}
    wide = [n for n in names if n in ALIGNED or signature[n].startswith("*")] if aligned else []
    source = ASTSource(
        fn=kernel, signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in wide},
    )  # fmt: skip
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=OPTIONS).asm["ptx"]


def everything():
    """For one architecture with addresses that are not aligned as well, and for arguments that are 1."""
    for kernel, types, fixed in variants():
        for architecture in ARCHITECTURES:
            yield kernel, types, fixed, architecture, True
        yield kernel, types, fixed, ARCHITECTURES[0], False
        ones = {name: 1 for name in ALIGNED if name in kernel.arg_names}
        yield kernel, types, {**fixed, **ones}, ARCHITECTURES[0], False


def main():
    found, count = {}, 0
    for kernel, types, fixed, architecture, aligned in everything():
        text = ptx_of(kernel, types, fixed, architecture, aligned)
        count += text.count(".entry")
        for word in re.findall(INEXACT, text):
            found.setdefault(word, f"{kernel.__name__} {fixed} sm_{architecture}")
    print(json.dumps([count, found]))


if __name__ == "__main__":
    main()
