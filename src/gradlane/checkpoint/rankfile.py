"""One rank's file, in the format of safetensors: its tensors, and all else as JSON in the metadata.

A tensor's name is its path in the state as a JSON pointer (RFC 6901): ``/memory/layers.0.weight``.
Nothing in such a file can be executed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import InvalidValue
from . import tree
from .opening import opened

DOCUMENT = "gradlane"  # the key of our JSON in the metadata
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Receipt(NamedTuple):
    """Size and digest of a written file, for the manifest."""

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
    """The file, piece by piece. safetensors would copy the state, or leave a temporary file if killed."""
    tensors: dict[str, Tensor] = {}
    values = []
    for path, value in tree.entries_of(state):
        if not isinstance(value, Tensor):
            values.append((path, value))
        elif value.dtype in NAMES and value.layout == torch.strided:
            tensors[_pointer(path)] = value.detach().cpu()
        else:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
            raise InvalidValue(
                f"the state has a tensor of {value.dtype} ({value.layout}) in {'/'.join(path)!r}; a "
                f"checkpoint holds dense ones of {dtypes}"
            )
    document = json.dumps({**head, "values": values}, allow_nan=False)
    header: dict[str, Any] = {"__metadata__": {DOCUMENT: document}}
    end = 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # aligned without gaps
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read(path: Path, expected: Receipt) -> Content:
    """Checks size, then digest, then form. It allocates no more memory than the file is long, twice."""
    data = _verified(path, expected)
    try:
        return _parsed(data)
    except (ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise InvalidValue(f"{path.name} is damaged although its digest is right: {error}") from error


def _verified(path: Path, expected: Receipt) -> bytes:
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
            data = file.read(size)
    except FileNotFoundError:
        raise InvalidValue(
            f"{path.name} is not in {path.parent}; each rank needs its own file there, and if the number of "
            "ranks has changed since the save, the files of all old ranks"
        ) from None
    if sha256(data).hexdigest() != expected.sha256:
        raise InvalidValue(
            f"{path.name} does not have the digest of the manifest; it is damaged: use another checkpoint"
        )
    return data


def _parsed(data: bytes) -> Content:
    tensors = load(data)  # refuses a header that does not describe the bytes behind it, each once
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document = json.loads(header["__metadata__"][DOCUMENT])
    entries: list[tuple[tree.Path, object]] = []
    for path, value in document.pop("values"):
        if not path or not all(isinstance(key, str) for key in path):
            raise ValueError(f"an entry has the path {path!r}")
        if not _is_plain(value):
            raise ValueError(f"the entry {'/'.join(path)!r} is {value!r:.60}, not a number or a string")
        entries.append((tuple(path), value))
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.view(torch.uint8).gt(1).any():
            raise ValueError(f"the bool tensor {name!r} has a byte above 1")
        entries.append((_path(name), tensor))
    return Content(document, tree.tree_of(entries))


def _is_plain(value: object) -> bool:
    """A finite number, a string, or the empty dict that stands for an empty part of the state."""
    if isinstance(value, float):
        return math.isfinite(value)
    return abs(value) < 2**64 if isinstance(value, int) else isinstance(value, str) or value == {}


def _pointer(path: tree.Path) -> str:
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)


def _path(pointer: str) -> tree.Path:
    first, *keys = pointer.split("/")
    if first or not keys:
        raise ValueError(f"the tensor name {pointer!r} is not a path")
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in keys)


def memory_of_this_machine() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not POSIX
        return 1 << 40
