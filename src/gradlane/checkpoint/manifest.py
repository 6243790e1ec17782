"""The manifest: one small file that names all files of a checkpoint, with their sizes and digests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from .._version import __version__
from ..errors import InvalidValue
from .rankfile import Receipt
from .subject import Layout, Parameter, Subject, as_layout

FORMAT = 2  # 1: rank files in a format of our own, named .state
LARGEST = 256 << 20  # bytes
TOKEN = re.compile(r"[0-9a-f]{16}")
FILE_NAME = re.compile(rf"rank-\d{{5,}}-of-\d{{5,}}-{TOKEN.pattern}\.(safetensors|state)")


@dataclass(frozen=True)
class Manifest:
    token: str
    """Identifies one call of ``save``; part of the name of every file that it wrote."""
    step: int
    strategy: str
    parameters: tuple[Parameter, ...]
    layout: Layout
    files: tuple[Receipt, ...]
    """One for each rank."""
    version: str = __version__

    @property
    def world(self) -> int:
        return len(self.files)

    def file(self, rank: int) -> str:
        return file_name(rank, self.world, self.token)

    def render(self) -> bytes:
        """The same bytes on every rank."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "gradlane": self.version,
            "token": self.token,
            "step": self.step,
            "world": self.world,
            "strategy": self.strategy,
            "files": [
                {"name": self.file(rank), "size": file.size, "sha256": file.sha256}
                for rank, file in enumerate(self.files)
            ],
            "parameters": [list(parameter) for parameter in self.parameters],
            "layout": self.layout,
        }
        return _text({**document, "sha256": sha256(_text(document)).hexdigest()})


def manifest_of(subject: Subject, token: str, files: Sequence[Receipt]) -> Manifest:
    return Manifest(
        token, subject.step, subject.text, tuple(subject.parameters), subject.layout, tuple(files)
    )


def file_name(rank: int, world: int, token: str) -> str:
    return f"rank-{rank:05d}-of-{world:05d}-{token}.safetensors"


def parsed(data: bytes) -> Manifest:
    """Refuses what this version would not have written byte for byte."""
    try:
        document = json.loads(data)
        if isinstance(found := document["format"], int) and found != FORMAT:
            age = "an older" if found < FORMAT else "a newer"
            raise InvalidValue(
                f"the checkpoint has format {found!s:.20}, of {age} gradlane; this one reads format {FORMAT} "
                f"only. Load it with the gradlane that saved it ({document.get('gradlane')!s:.20}), or start "
                "without it: the strategy then begins with an empty state"
            )
        manifest = _read(document)
        if manifest.render() != data:
            raise ValueError("its digest is wrong")
    except InvalidValue:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidValue(
            f"the manifest is damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    return manifest


def _read(document: dict[str, Any]) -> Manifest:
    step, token = document["step"], document["token"]
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f"step {step!r}")
    if not document["files"]:
        raise ValueError("no files")
    if not TOKEN.fullmatch(token):  # it becomes part of file names
        raise ValueError(f"token {token!r}")
    return Manifest(
        token,
        step,
        str(document["strategy"]),
        tuple(Parameter(*parameter) for parameter in document["parameters"]),
        as_layout(document["layout"]),
        tuple(Receipt(int(file["size"]), str(file["sha256"])) for file in document["files"]),
        str(document["gradlane"]),
    )


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
