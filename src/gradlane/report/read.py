"""Reads and checks the JSON of ``gradlane bench``, ``gradlane train`` and ``gradlane plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from .._version import __version__
from ..errors import InvalidValue
from .documents import Bench, Plan, Train

FORMAT = 1  # the one format this version reads
WAY_OUT = "use a complete file that `gradlane bench`, `gradlane train` or `gradlane plan` wrote"
LARGEST = 1e300  # a number above it, or one that is not finite, cannot be drawn: it counts as not measured
T = TypeVar("T")
Document = Bench | Train | Plan


class Head(msgspec.Struct):
    kind: Literal["bench", "train", "plan"]
    format: int


def load(path: Path) -> Document:
    """The document in a file; ``InvalidValue`` names the field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(
            text, parse_constant=_number, parse_float=_number, parse_int=lambda digits: _number(digits, int)
        )
    except FileNotFoundError:
        raise InvalidValue(
            f"there is no file {path}; give the JSON of `gradlane bench`, `train` or `plan`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not JSON ({error}); {WAY_OUT}") from None
    return document_of(content, str(path))


def document_of(content: Any, path: str) -> Document:
    """The document of decoded JSON; ``path`` names it in errors."""
    head = _as(Head, content, path)
    if head.format != FORMAT:
        raise InvalidValue(
            f"{path} has format {head.format}, gradlane {__version__} reads format {FORMAT}; "
            f"use the gradlane that wrote it, or run `gradlane {head.kind}` again"
        )
    if content.get("results", []) == []:
        raise InvalidValue(f"{path} holds no results; run `gradlane {head.kind}` until one arm is done")
    if head.kind == "plan":
        return _as(Plan, content, path)
    return _as(Bench, content, path) if head.kind == "bench" else _as(Train, content, path)


def _as(kind: type[T], content: Any, path: str) -> T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{path}: {error}; {WAY_OUT}") from None


def _number(text: str, kind: type[float] = float) -> float | None:
    """None for NaN and Infinity, which Python writes though JSON does not have them."""
    return kind(text) if abs(float(text)) < LARGEST else None
