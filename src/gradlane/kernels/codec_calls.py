"""The C functions of codecs, of the rows of all ranks, and of checks, as methods on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_void_p

from torch import Tensor

from .counter import Keys
from .library import Library, check_memory, pointer


class CodecCalls(Library):
    """A part of ``Native``. csrc/kernels.h says what each function does."""

    # fmt: off
    def encode_blocks(
        self, form: int, flags: int, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None,
        block: int, keys: Keys, codes: Tensor, side: Tensor,
    ) -> None:
        """Encode flat, or flat + residual; then ``residual_out`` takes the part that was not sent."""
        self._call["encode_blocks"](
            *self._how(), form, flags, flat.data_ptr(), pointer(residual), pointer(residual_out),
            flat.numel(), block, *keys, codes.data_ptr(), side.data_ptr(),
        )

    def decode_blocks(
        self, form: int, flags: int, codes: Tensor, side: Tensor, block: int, keys: Keys, out: Tensor,
        add: bool,
    ) -> None:
        self._call["decode_blocks"](
            *self._how(), form, flags, codes.data_ptr(), side.data_ptr(), out.numel(), block, *keys,
            out.data_ptr(), add,
        )

    def decode_many(
        self, form: int, flags: int, payloads: Sequence[tuple[Tensor, ...]], block: int,
        keys: Sequence[Keys], out: Tensor, factor: float,
    ) -> None:
        """The sum of all, in their order, with every scale times ``factor``; forms without scales
        ignore it."""
        count = len(payloads)
        codes, sides = ((c_void_p * count)(*[p[part].data_ptr() for p in payloads]) for part in (0, 1))
        pairs = (c_uint32 * (2 * count))(*[key for pair in keys for key in pair])
        check_memory(self._call["decode_many"](
            *self._how(), form, flags, count, codes, sides, pairs, out.numel(), block, out.data_ptr(),
            factor,
        ))

    def topk_sampled(
        self, flat: Tensor, residual: Tensor | None, offset: int, stride: int, rank: int
    ) -> int:
        """The bits of the rank-th largest magnitude (from 1) in a strided sample of flat + residual."""
        return check_memory(self._call["topk_sampled"](
            flat.data_ptr(), pointer(residual), flat.numel(), offset, stride, rank
        ))

    def topk_exact(self, flat: Tensor, residual: Tensor | None, rank: int) -> int:
        """The bits of the rank-th largest magnitude of flat + residual."""
        return check_memory(self._call["topk_exact"](
            flat.data_ptr(), pointer(residual), flat.numel(), rank
        ))

    def topk_select(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, threshold: int,
        start: int, values: Tensor, indices: Tensor, counts: Tensor,
    ) -> int:
        """Select what reaches the threshold; return how many elements do, selected or not.

        With ``residual``, the elements are those of flat + residual, and ``residual_out`` gets those
        that are not selected. Without, ``residual_out`` is None, or flat itself, which loses what is
        selected.
        """
        return check_memory(self._call["topk_select"](
            *self._how(), flat.data_ptr(), pointer(residual), pointer(residual_out), flat.numel(),
            threshold, start, values.numel(), values.data_ptr(), values.element_size() == 2,
            indices.data_ptr(), counts.data_ptr(),
        ))

    def topk_scatter(
        self, values: Tensor, indices: Tensor, counts: Tensor, into: Tensor, factor: float
    ) -> None:
        self._call["topk_scatter"](
            values.data_ptr(), values.element_size() == 2, indices.data_ptr(), counts.data_ptr(),
            values.numel(), into.numel(), into.data_ptr(), factor,
        )

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
        """Of each column, the mean of the low-th to the (high - 1)-th smallest value, or of the ``keep``
        values nearest to its median. ``network`` lists the comparisons that sort a column."""
        self._call["middle"](
            *self._how(), rows.data_ptr(), *rows.shape, network, len(network) // 2, low, high, keep,
            out.data_ptr(),
        )
    # fmt: on

    def gram(self, rows: Tensor, out: Tensor) -> None:
        """out = rows rows^T in fp64."""
        check_memory(self._call["gram"](*self._how(), rows.data_ptr(), *rows.shape, out.data_ptr()))

    def all_finite(self, flat: Tensor, dtype: int) -> bool:
        """``dtype`` is a value of ``finite.DTYPES``."""
        return bool(self._call["all_finite"](*self._how(), flat.data_ptr(), flat.numel(), dtype))
