"""The C library: the signatures of its functions, and how a level of instructions calls them.

ctypes passes bare pointers, so a wrong signature corrupts memory without a message.
tests/unit/test_kernel_signatures.py compares ``SIGNATURES`` with csrc/kernels.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from functools import partial

import torch
from torch import Tensor

ABI = 10  # the same number as in csrc/kernels.h; raise both with every change of a signature
LEVELS = ("portable", "avx2", "avx512")

Signature = tuple[tuple[type, ...], type | None]

_HOW = (c_int, c_int)  # level, threads
_FORM = (c_int, c_int)  # form, flags
_KEYS = (c_uint32, c_uint32)
_FEEDBACK = (c_void_p, c_void_p, c_void_p)  # gradient, residual, residual_out
_SHAPE = (c_int64, c_int64, c_int64)  # a, b, r of a matrix [a, b] and r ranks
_PROJECT = (*_HOW, c_void_p, c_void_p, c_void_p, *_SHAPE, c_void_p, c_int, c_void_p)

# fmt: off
SIGNATURES: dict[str, Signature] = {
    "abi": ((), c_int),
    "best_level": ((), c_int),
    "encode_blocks": (
        (*_HOW, *_FORM, *_FEEDBACK, c_int64, c_int64, *_KEYS, c_void_p, c_void_p), None),
    "decode_blocks": (
        (*_HOW, *_FORM, c_void_p, c_void_p, c_int64, c_int64, *_KEYS, c_void_p, c_int), None),
    "decode_many": (
        (*_HOW, *_FORM, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float), c_int),
    "topk_sampled": ((c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64), c_int64),
    "topk_exact": ((c_void_p, c_void_p, c_int64, c_int64), c_int64),
    "topk_select": (
        (*_HOW, *_FEEDBACK, c_int64, c_uint32, c_int64, c_int64, c_void_p, c_int, c_void_p, c_void_p),
        c_int64),
    "topk_scatter": (
        (c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float), None),
    "random_gather": ((c_void_p, c_int64, c_int64, c_int64, *_KEYS, c_int, c_void_p), None),
    "random_scatter": ((c_void_p, c_int64, c_int64, c_int64, *_KEYS, c_float, c_void_p), None),
    "middle": ((*_HOW, c_void_p, c_int, c_int64, c_void_p, c_int, c_int, c_int, c_int, c_void_p), None),
    "gram": ((*_HOW, c_void_p, c_int, c_int64, c_void_p), c_int),
    "all_finite": ((*_HOW, c_void_p, c_int64, c_int), c_int),
    "divide": ((*_HOW, c_void_p, c_int64, c_float, c_float), c_int),
    "project_rows": (_PROJECT, None),
    "project_columns": (_PROJECT, c_int),
    "expand": ((*_HOW, c_void_p, c_void_p, *_SHAPE, c_void_p), None),
    "add_residual": ((*_HOW, c_void_p, c_void_p, c_int64), None),
    "subtract_product": (
        (*_HOW, c_void_p, c_void_p, c_void_p, *_SHAPE, c_void_p, c_void_p), None),
    "orthonormalise": ((c_int, c_void_p, c_int64, c_int64), c_int),
}
# fmt: on


class Library:
    """The C functions at one level of instructions, with as many threads as torch uses.

    Every tensor that a method gets must be contiguous, on the CPU, and of the dtype and size that the
    function expects: the callers check that.
    """

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        self._level = LEVELS.index(level)
        self._call = {}
        for name, (arguments, result) in SIGNATURES.items():
            function = library[f"gradlane_{name}"]
            function.argtypes, function.restype = arguments, result
            self._call[name] = function

    def function(self, name: str) -> Callable[..., int]:
        """A C function at this level; its first argument is the number of threads."""
        return partial(self._call[name], self._level)

    def _how(self) -> tuple[int, int]:
        return self._level, torch.get_num_threads()


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_memory(result: int) -> int:
    """The result of a function that returns -1 if it cannot allocate memory."""
    if result < 0:
        raise MemoryError("a compiled kernel cannot allocate its scratch memory; free some memory")
    return result
