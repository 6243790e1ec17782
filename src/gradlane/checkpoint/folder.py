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


def write_atomically(folder: Path, name: str, write: Callable[[BinaryIO], T]) -> T:
    """Write to a file of another name, flush it to the disk, then rename it: never half a file."""
    unfinished = folder / (name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    _sync(folder)
    return result


def checkpoints_in(folder: Path) -> list[Manifest]:
    """The current checkpoint; then the previous one, if a save is running or was interrupted."""
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
    """Replace the current checkpoint by the new one, in one moment; False if the new one is here already.

    ``keep`` is the token of a checkpoint to keep as the previous one, if it is here: ranks with a disk each
    commit one after the other, and may be interrupted between.
    """
    if _has(folder, manifest):
        return False
    with contextlib.suppress(FileNotFoundError, InvalidValue):
        old = _manifest(folder / MANIFEST)
        if old.token == keep:
            write_atomically(folder, PREVIOUS, lambda file: file.write(old.render()))
    write_atomically(folder, MANIFEST, lambda file: file.write(manifest.render()))
    return True


def _has(folder: Path, manifest: Manifest) -> bool:
    try:
        return _read_limited(folder / MANIFEST) == manifest.render()
    except (FileNotFoundError, InvalidValue):
        return False


def clean(folder: Path, manifest: Manifest) -> None:
    """Remove files of ``save`` that belong to no checkpoint any more, and no others. A file that cannot be
    removed does no harm."""
    current = {manifest.file(rank) for rank in range(manifest.world)}
    names = {path: path.name.removesuffix(UNFINISHED) for path in folder.glob("rank-*-of-*")}
    stale = [path for path, name in names.items() if FILE_NAME.fullmatch(name) and path.name not in current]
    try:
        for path in (folder / PREVIOUS, *folder.glob(f"{MANIFEST}{UNFINISHED}"), *stale):
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("old files of the checkpoint could not be removed: %s", error)


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
    """Flush the new name to the disk as well. Some systems cannot open a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
