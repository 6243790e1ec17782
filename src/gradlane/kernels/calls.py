"""The functions of the C library as methods on tensors.

Every tensor must be contiguous, on the CPU, and of the dtype and size that the codec's layout says;
``Codec`` checks that before it comes here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from functools import partial

import torch
from torch import Tensor

from .counter import Keys
from .lowrank_calls import LOW_RANK, LowRankCalls

ABI = 10  # the same number as in csrc/native.c; raise both with every change of a signature
LEVELS = ("portable", "avx2", "avx512")

_HOW = (c_int, c_int)  # level, threads
_KEYS = (c_uint32, c_uint32)
_RESIDUALS = (c_void_p, c_void_p, c_void_p)  # gradient, the residual, the residual afterwards
_FORM = (c_int, c_int)  # form, flags
_SIZES = (c_int64, c_int64)  # elements and block, or slots and elements
_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "encode_blocks": ((*_HOW, *_FORM, *_RESIDUALS, *_SIZES, *_KEYS, c_void_p, c_void_p), None),
    "decode_blocks": ((*_HOW, *_FORM, c_void_p, c_void_p, *_SIZES, *_KEYS, c_void_p, c_int), None),
    "decode_many": ((*_HOW, *_FORM, c_int, c_void_p, c_void_p, c_void_p, *_SIZES, c_void_p, c_float), c_int),
    "topk_sampled": ((c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64), c_int64),
    "topk_exact": ((c_void_p, c_void_p, c_int64, c_int64), c_int64),
    "topk_select": (
        (*_HOW, *_RESIDUALS, c_int64, c_uint32, *_SIZES, c_void_p, c_int, c_void_p, c_void_p),
        c_int64,
    ),
    "topk_scatter": ((c_void_p, c_int, c_void_p, c_void_p, *_SIZES, c_void_p, c_float), None),
    "random_gather": ((c_void_p, c_int64, *_SIZES, *_KEYS, c_int, c_void_p), None),
    "middle": (
        (*_HOW, c_void_p, c_int, c_int64, c_void_p, c_int, c_int, c_int, c_int, c_void_p),
        None,
    ),
    "gram": ((*_HOW, c_void_p, c_int, c_int64, c_void_p), c_int),
    "divide": ((*_HOW, c_void_p, c_int64, c_float, c_float), c_int),
    "all_finite": ((*_HOW, c_void_p, c_int64, c_int), c_int),
    "random_scatter": ((c_void_p, c_int64, *_SIZES, *_KEYS, c_float, c_void_p), None),
    **LOW_RANK,
}


class Native(LowRankCalls):
    """One library at one level of instructions; as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        self._level = LEVELS.index(level)
        self._call = {}
        for name, (arguments, result) in _SIGNATURES.items():
            function = library[f"gradlane_{name}"]
            function.argtypes, function.restype = arguments, result
            self._call[name] = function

    def function(self, name: str) -> Callable[..., int]:
        """The C function itself, at this level; its first argument is the number of threads."""
        return partial(self._call[name], self._level)

    def _how(self) -> tuple[int, int]:
        return self._level, torch.get_num_threads()

    def encode_blocks(
        self, form: int, flags: int, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None,
        block: int, keys: Keys, codes: Tensor, side: Tensor,
    ) -> None:  # fmt: skip
        """Encode block by block; with ``residual``, that of flat + residual, and ``residual_out`` takes
        what is left."""
        self._call["encode_blocks"](
            *self._how(), form, flags, flat.data_ptr(), _pointer(residual), _pointer(residual_out),
            flat.numel(), block, *keys, codes.data_ptr(), side.data_ptr(),
        )  # fmt: skip

    def decode_blocks(
        self,
        form: int,
        flags: int,
        codes: Tensor,
        side: Tensor,
        block: int,
        keys: Keys,
        out: Tensor,
        add: bool,
    ) -> None:
        self._call["decode_blocks"](
            *self._how(), form, flags, codes.data_ptr(), side.data_ptr(), out.numel(), block,
            *keys, out.data_ptr(), add,
        )  # fmt: skip

    def decode_many(
        self,
        form: int,
        flags: int,
        payloads: Sequence[tuple[Tensor, ...]],
        block: int,
        keys: Sequence[Keys],
        out: Tensor,
        factor: float,
    ) -> None:
        """The sum of all, in their order, with every scale times ``factor``; forms without scales
        do not heed it."""
        count = len(payloads)
        codes, sides = ((c_void_p * count)(*[p[part].data_ptr() for p in payloads]) for part in (0, 1))
        pairs = (c_uint32 * (2 * count))(*[key for pair in keys for key in pair])
        _or_no_memory(
            self._call["decode_many"](
                *self._how(), form, flags, count, codes, sides, pairs, out.numel(), block,
                out.data_ptr(), factor,
            )
        )  # fmt: skip

    def topk_sampled(self, flat: Tensor, residual: Tensor | None, offset: int, stride: int, rank: int) -> int:
        """The bits of the rank-th largest magnitude (from 1) in a strided sample of flat + residual."""
        found = self._call["topk_sampled"](
            flat.data_ptr(), _pointer(residual), flat.numel(), offset, stride, rank
        )
        return _or_no_memory(found)

    def topk_exact(self, flat: Tensor, residual: Tensor | None, rank: int) -> int:
        """The bits of the rank-th largest magnitude of flat + residual."""
        return _or_no_memory(
            self._call["topk_exact"](flat.data_ptr(), _pointer(residual), flat.numel(), rank)
        )

    def topk_select(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, threshold: int, start: int,
        values: Tensor, indices: Tensor, counts: Tensor,
    ) -> int:  # fmt: skip
        """Take what reaches the threshold; return how much there was, taken or not.

        With ``residual``, flat + residual is looked at, and ``residual_out`` gets what is not taken of it.
        Without, ``residual_out``
        is None, or flat itself, which loses what is taken.
        """
        found = self._call["topk_select"](
            *self._how(), flat.data_ptr(), _pointer(residual), _pointer(residual_out), flat.numel(),
            threshold, start, values.numel(), values.data_ptr(), values.element_size() == 2,
            indices.data_ptr(), counts.data_ptr(),
        )  # fmt: skip
        return _or_no_memory(found)

    def topk_scatter(
        self, values: Tensor, indices: Tensor, counts: Tensor, into: Tensor, factor: float
    ) -> None:
        self._call["topk_scatter"](
            values.data_ptr(), values.element_size() == 2, indices.data_ptr(), counts.data_ptr(),
            values.numel(), into.numel(), into.data_ptr(), factor,
        )  # fmt: skip

    def random_gather(
        self, flat: Tensor, run: int, units: int, keys: Keys, scaled: bool, values: Tensor
    ) -> None:
        self._call["random_gather"](
            flat.data_ptr(), flat.numel(), run, units, *keys, scaled, values.data_ptr()
        )

    def random_scatter(
        self, values: Tensor, run: int, units: int, keys: Keys, into: Tensor, factor: float
    ) -> None:
        self._call["random_scatter"](
            values.data_ptr(), into.numel(), run, units, *keys, factor, into.data_ptr()
        )

    def middle(
        self, rows: Tensor, network: bytes, out: Tensor, low: int = 0, high: int = 0, keep: int = 0
    ) -> None:
        """The mean of the low-th to the (high - 1)-th smallest of each column, or of the ``keep`` nearest to
        its median; the network sorts."""
        ranks, columns = rows.shape
        self._call["middle"](
            *self._how(), rows.data_ptr(), ranks, columns, network, len(network) // 2, low, high, keep,
            out.data_ptr(),
        )  # fmt: skip

    def gram(self, rows: Tensor, out: Tensor) -> None:
        """out = rows rows^T in fp64."""
        ranks, columns = rows.shape
        _or_no_memory(self._call["gram"](*self._how(), rows.data_ptr(), ranks, columns, out.data_ptr()))

    def all_finite(self, numbers: Tensor, width: int) -> bool:
        """``width`` is the number of the dtype in ``finite``."""
        return bool(self._call["all_finite"](*self._how(), numbers.data_ptr(), numbers.numel(), width))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _or_no_memory(found: int) -> int:
    if found < 0:
        raise MemoryError("no memory for the work of a codec")
    return found
