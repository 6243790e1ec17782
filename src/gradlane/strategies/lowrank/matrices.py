"""Which gradients of a bucket travel as factors, and which as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...core.bucket import Bucket, Slot, layout_digest
from ...core.numbers import is_number, is_whole
from ...errors import InvalidValue, WrongType
from ...kernels.finite import all_finite

Rank = int | Mapping[str, int] | Callable[[str, torch.Size], int]
View = Literal["tensor", "bucket"]
VIEWS = ("tensor", "bucket")
WHOLE_BUCKET = "bucket "  # begins the name of a matrix that is one


class Matrix(NamedTuple):
    """A part of the flat gradient that travels as P (rank x rows) and Q (rank x columns)."""

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class Cut(NamedTuple):
    """A bucket's matrices, and the rest of it, which is dense."""

    matrices: tuple[Matrix, ...]
    rest: tuple[slice, ...]

    def rest_numel(self) -> int:
        return sum(place.stop - place.start for place in self.rest)

    def gather(self, flat: Tensor, residual: Tensor | None, into: Tensor) -> None:
        """The rest, with the residual of it, as one run."""
        for place, run in self._runs(into):
            if residual is None:
                run.copy_(flat[place])
            else:
                torch.add(flat[place], residual[place], out=run)

    def scatter(self, run: Tensor, into: Tensor) -> None:
        for place, part in self._runs(run):
            into[place].copy_(part)

    def settle_rest(self, averaged: Tensor, residual: Tensor, residual_out: Tensor | None) -> None:
        """The rest was sent whole and nothing of it is ``residual_out``, but for what came back as no
        number."""
        if averaged.device.type == "meta" or residual_out is None:
            return
        usual = all_finite(averaged)  # then there is no need of a mask
        for place, part in self._runs(averaged):
            if usual:
                residual_out[place].zero_()
            else:
                residual_out[place].copy_(residual[place]).masked_fill_(part.isfinite(), 0.0)

    def leave_rest(self, given: Tensor, sent: Tensor, residual_out: Tensor) -> None:
        """``residual_out`` becomes what was ``given`` of the rest and not ``sent``, rounded to its width."""
        for place, part in self._runs(sent):
            residual_out[place].copy_(given[place].sub_(part).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def _runs(self, whole: Tensor) -> Iterator[tuple[slice, Tensor]]:
        start = 0
        for place in self.rest:
            stop = start + place.stop - place.start
            yield place, whole[start:stop]
            start = stop


class Shaped(NamedTuple):
    """What the cut is made of: one matrix for each tensor, or one for the bucket."""

    name: str
    shape: torch.Size
    start: int
    rows: int
    columns: int


def matrices_of(bucket: Bucket, view: View) -> list[Shaped]:
    """Tensors of two or more dimensions as shape[0] x the rest; or the whole bucket, nearly square.

    A bucket of n elements has isqrt(n) rows; what is left over when they are of one length, less than a
    row, is no part of the matrix.
    """
    if view == "bucket":
        numel = bucket.flat.numel()
        side = math.isqrt(numel)
        name = WHOLE_BUCKET + layout_digest(bucket.layout)
        return [Shaped(name, torch.Size([numel]), 0, side, numel // side)] if side else []
    found, start = [], 0
    for name, shape in bucket.layout:
        numel = shape.numel()
        if len(shape) >= 2 and numel:
            found.append(Shaped(name, shape, start, shape[0], numel // shape[0]))
        start += numel
    return found


def cut(bucket: Bucket, rank: Rank, least_rate: float, view: View) -> Cut:
    """A matrix of a x b travels as factors of rank r where (a + b) r ``least_rate`` < a b."""
    matrices = []
    for name, shape, start, rows, columns in matrices_of(bucket, view):
        r = min(rows, columns, rank_of(rank, name, shape))
        if r and (rows + columns) * r * least_rate < rows * columns:
            matrices.append(Matrix(name, start, rows, columns, r))
    return Cut(tuple(matrices), tuple(_between(matrices, bucket.flat.numel())))


def most_rank(matrix: Shaped, rank: Rank, least_rate: float) -> int:
    """The largest rank up to the one asked for that ``least_rate`` allows; 0 if none."""
    size, whole = matrix.rows + matrix.columns, matrix.rows * matrix.columns
    most = min(matrix.rows, matrix.columns, rank_of(rank, matrix.name, matrix.shape))
    if least_rate:
        most = min(most, int(whole / (size * least_rate)) + 1)
    while most and size * most * least_rate >= whole:
        most -= 1
    return most


def _between(matrices: list[Matrix], end: int) -> Iterator[slice]:
    start = 0
    for matrix in matrices:
        if start < matrix.start:
            yield slice(start, matrix.start)
        start = matrix.start + matrix.rows * matrix.columns
    if start < end:
        yield slice(start, end)


def rank_of(rank: Rank, name: str, shape: torch.Size) -> int:
    """0 for a tensor that is to travel as it is."""
    if isinstance(rank, int):
        return rank
    if isinstance(rank, Mapping):
        return next((r for pattern, r in rank.items() if fnmatchcase(name, pattern)), 0)
    found = rank(name, shape)
    if not is_whole(found) or found < 0:
        raise InvalidValue(f"the rule for ranks gave {found!r} for {name!r}; return a whole number from 0 up")
    return found


def check_rank(strategy: str, rank: object) -> None:
    if isinstance(rank, Mapping):
        for pattern, r in rank.items():
            if not isinstance(pattern, str):
                raise WrongType(f"{strategy} rank has the key {pattern!r}; use name patterns such as 'fc*'")
            check_whole(strategy, f"rank[{pattern!r}]", r, least=0)
    elif not is_whole(rank) and not callable(rank):
        raise WrongType(
            f"{strategy} rank={rank!r}; use a whole number, a dict of name patterns to numbers, or a "
            "function of name and shape"
        )
    elif is_whole(rank):
        check_whole(strategy, "rank", rank, least=1)


def check_whole(strategy: str, what: str, number: object, least: int) -> None:
    if not is_whole(number) or number < least:
        raise InvalidValue(f"{strategy} {what}={number!r}; use a whole number from {least} up")


def check_common(strategy: str, rank: object, least_rate: float, view: str, seed: int) -> None:
    check_rank(strategy, rank)
    check_whole(strategy, "seed", seed, least=0)
    if not is_number(least_rate) or not 0 <= least_rate < math.inf:
        raise InvalidValue(f"{strategy} min_compression_rate={least_rate!r}; use a number from 0 up")
    if view not in VIEWS:
        raise InvalidValue(f"{strategy} view={view!r}; use one of {', '.join(VIEWS)}")


def slot_of(matrix: Matrix) -> Slot:
    return Slot(matrix.name, torch.Size([matrix.rows, matrix.columns]))
