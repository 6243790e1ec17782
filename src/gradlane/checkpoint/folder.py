"""The folder of a checkpoint: atomic writes, and which checkpoints are in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..errors import InvalidValue
from ..log import log
from .manifest import FILE_NAME, LARGEST, Manifest, parsed
from .opening import opened

T = TypeVar("T")
MANIFEST = "manifest.json"
PREVIOUS = "manifest.previous.json"
UNFINISHED = ".unfinished"


def write_whole(folder: Path, name: str, write: Callable[[BinaryIO], T]) -> T:
    """Under another name first, on the disk, and only then under its own: never half a file."""
    passing = folder / (name + UNFINISHED)
    try:
        with passing.open("wb") as file:
            done = write(file)
            file.flush()
            os.fsync(file.fileno())
        passing.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            passing.unlink()
        raise
    _sync(folder)
    return done


def checkpoints_in(folder: Path) -> list[Manifest]:
    """The one in force, and behind it the one before while a save is under way or was broken off."""
    try:
        found = [_manifest(folder / MANIFEST)]
    except FileNotFoundError:
        raise InvalidValue(
            f"there is no {MANIFEST} in {folder}; give the folder that Attachment.save was given"
        ) from None
    with contextlib.suppress(FileNotFoundError, InvalidValue):
        found.append(_manifest(folder / PREVIOUS))
    return found


def commit(folder: Path, manifest: Manifest, keep: str | None) -> bool:
    """The moment in which the new checkpoint takes the place of the old one; False if it is here already.

    ``keep`` is the token of a checkpoint that stays to fall back on, if it is here: where ranks have a disk
    each they commit one after the other.
    """
    if _has(folder, manifest):
        return False
    with contextlib.suppress(FileNotFoundError, InvalidValue):
        old = _manifest(folder / MANIFEST)
        if old.token == keep:
            write_whole(folder, PREVIOUS, lambda file: file.write(old.render()))
    write_whole(folder, MANIFEST, lambda file: file.write(manifest.render()))
    return True


def _has(folder: Path, manifest: Manifest) -> bool:
    try:
        return _read_limited(folder / MANIFEST) == manifest.render()
    except (FileNotFoundError, InvalidValue):
        return False


def clean(folder: Path, manifest: Manifest) -> None:
    """Remove what belongs to no checkpoint any more, and nothing that ``save`` has not written. What
    cannot be removed is in nobody's way."""
    mine = {manifest.file(rank) for rank in range(manifest.world)}
    there = {path: path.name.removesuffix(UNFINISHED) for path in folder.glob("rank-*-of-*")}
    stale = [path for path, name in there.items() if FILE_NAME.fullmatch(name) and path.name not in mine]
    try:
        for path in (folder / PREVIOUS, *folder.glob(f"{MANIFEST}{UNFINISHED}"), *stale):
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("old files of the checkpoint stay: %s", error)


def remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _manifest(path: Path) -> Manifest:
    return parsed(_read_limited(path))


def _read_limited(path: Path) -> bytes:
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                raise InvalidValue(f"{path.name} has {size:,} bytes; a manifest has at most {LARGEST:,}")
            return file.read(size)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    """So that the new name is on the disk as well; not every system opens a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
