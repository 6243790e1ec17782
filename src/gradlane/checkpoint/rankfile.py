"""One rank's file: a header in JSON, then the bytes of its tensors. Nothing in it can be executed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidValue
from . import tree
from .opening import opened

MAGIC = b"gradlane"
ALIGN = 64  # bytes; every tensor begins at a multiple of it
LARGEST_HEADER = 256 << 20
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Receipt(NamedTuple):
    """What was written: for the manifest."""

    size: int
    sha256: str


class Content(NamedTuple):
    head: dict[str, Any]
    state: dict[str, Any]


def write(file: BinaryIO, head: Mapping[str, Any], state: Mapping[str, Any]) -> Receipt:
    digest, size = sha256(), 0
    for piece in _pieces(head, state):
        file.write(piece)
        digest.update(piece)
        size += len(piece)
    return Receipt(size, digest.hexdigest())


def _pieces(head: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    described: list[tuple[tree.Path, object]] = []
    tensors: list[Tensor] = []
    end = 0
    for path, value in tree.entries_of(state):
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in DTYPES or value.is_sparse:
                raise InvalidValue(
                    f"the state has a tensor of {value.dtype} ({value.layout}) in {'/'.join(path)!r}; a "
                    f"checkpoint holds dense ones of {', '.join(DTYPES)}"
                )
            described.append((path, {"dtype": dtype, "shape": list(value.shape), "at": end}))
            tensors.append(value)
            end = _aligned(end + value.numel() * value.element_size())
        else:
            described.append((path, value))
    header = json.dumps({**head, "entries": described}, allow_nan=False).encode()
    header += b" " * (_aligned(16 + len(header)) - 16 - len(header))
    yield MAGIC + len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        yield memoryview(plain.numpy())  # type: ignore[arg-type]
        yield bytes(_aligned(len(plain)) - len(plain))


def read(path: Path, expected: Receipt) -> Content:
    """Size, then digest, then form: nothing is allocated that the file does not have."""
    buffer = _verified(path, expected)
    try:
        return _parsed(buffer)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidValue(f"{path.name} is damaged although its digest is right: {error}") from error


def _verified(path: Path, expected: Receipt) -> bytearray:
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise InvalidValue(
                    f"{path.name} has {size:,} bytes, the manifest says {expected.size:,}; it is not what "
                    "was saved: use another checkpoint"
                )
            if size > memory_of_this_machine():
                raise InvalidValue(f"{path.name} has {size:,} bytes, more than this machine's memory")
            buffer = bytearray(size)
            count = file.readinto(buffer)
    except FileNotFoundError:
        raise InvalidValue(
            f"{path.name} is not in {path.parent}; each rank needs its own file there, and with another "
            "number of ranks than it was saved with those of all old ranks"
        ) from None
    if count != len(buffer) or sha256(buffer).hexdigest() != expected.sha256:
        raise InvalidValue(
            f"{path.name} has not the digest of the manifest; it is damaged: use another checkpoint"
        )
    return buffer


def _parsed(buffer: bytearray) -> Content:
    length = int.from_bytes(buffer[8:16], "little")
    if bytes(buffer[:8]) != MAGIC or not 0 < length <= min(len(buffer) - 16, LARGEST_HEADER):
        raise ValueError("it does not begin like a checkpoint")
    document = json.loads(
        bytes(buffer[16 : 16 + length]), parse_int=number, parse_float=_finite, parse_constant=_no_constant
    )
    if not isinstance(document, dict):
        raise TypeError("its header is no object")
    entries, end = [], 16 + length
    for path, value in document.pop("entries"):
        if not path or not all(isinstance(key, str) for key in path):
            raise ValueError(f"an entry has the path {path!r}")
        if isinstance(value, dict) and value:
            value, end = _tensor(buffer, 16 + length, end, value)
        elif not isinstance(value, dict | bool | int | float | str):
            raise TypeError(f"the entry {'/'.join(path)!r} is a {type(value).__name__}")
        entries.append((tuple(path), value))
    if end != len(buffer):
        raise ValueError(f"{len(buffer) - end} bytes belong to no tensor")
    return Content(document, tree.tree_of(entries))


def _tensor(buffer: bytearray, data: int, end: int, said: dict[str, Any]) -> tuple[Tensor, int]:
    dtype, shape = DTYPES[said["dtype"]], said["shape"]
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"a tensor has the shape {shape}")
    numel = math.prod(shape)
    after = end + _aligned(numel * dtype.itemsize)
    if type(said["at"]) is not int or data + said["at"] != end or after > len(buffer):
        raise ValueError(
            f"a tensor of {numel:,} elements begins at {said['at']}, there are {len(buffer):,} bytes"
        )
    if not numel:
        return torch.empty(shape, dtype=dtype), after
    if dtype == torch.bool and max(buffer[end : end + numel]) > 1:
        raise ValueError("a tensor of bool holds something else")
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=end).view(shape), after


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def number(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _no_constant(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"it has the number {text}")


def memory_of_this_machine() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return 1 << 40
