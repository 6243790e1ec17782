"""The compiled kernels: found and loaded on first use, called on data pointers without the GIL."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter

from ..errors import InvalidValue
from .codec_calls import CodecCalls
from .library import ABI, LEVELS
from .lowrank_calls import LowRankCalls

VARIABLE = "GRADLANE_KERNELS"
CHOICES = ("torch", *LEVELS)
SHOWN = {"portable": "portable", "avx2": "AVX2", "avx512": "AVX-512"}


class Native(CodecCalls, LowRankCalls):
    """All functions of the C library, at one level of instructions."""


def native() -> Native | None:
    """The compiled kernels, or None where plain torch replaces them.

    The environment variable GRADLANE_KERNELS chooses: torch, portable, avx2 or avx512; by default the
    best level that the processor has.
    """
    return _loaded(os.environ.get(VARIABLE, ""))[0]


def native_for(tensor: Tensor) -> Native | None:
    """The compiled kernels, or None if this tensor is not on the CPU. Of other classes, such as torch's fake
    tensors, some have no memory."""
    plain = type(tensor) is Tensor or type(tensor) is Parameter
    return native() if plain and tensor.device.type == "cpu" else None


def kernels_in_use() -> str:
    """Which kernels run: ``C, AVX2``, or ``torch (no compiled kernels: REASON)``."""
    kernels, reason = _loaded(os.environ.get(VARIABLE, ""))
    return f"C, {SHOWN[kernels.level]}" if kernels else f"torch (no compiled kernels: {reason})"


def levels() -> tuple[str, ...]:
    """The levels that can be chosen on this machine, lowest first; empty without a library."""
    library, _ = _library()
    return LEVELS[: library.gradlane_best_level() + 1] if library else ()


@lru_cache(maxsize=16)
def _loaded(choice: str) -> tuple[Native | None, str]:
    """The kernels for a value of the variable, or None and the reason."""
    if choice and choice not in CHOICES:
        raise InvalidValue(
            f"{VARIABLE}={choice!r} is not known; use one of {', '.join(CHOICES)}, or unset it"
        )
    if choice == "torch":
        return None, f"{VARIABLE}=torch"
    library, reason = _library()
    if library is None:
        return None, reason
    best = LEVELS[library.gradlane_best_level()]
    if choice and LEVELS.index(choice) > LEVELS.index(best):
        raise InvalidValue(f"{VARIABLE}={choice} is more than this processor has; it goes up to {best}")
    return Native(library, choice or best), ""


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None, "not built; install with a C compiler present"
    try:
        library = ctypes.CDLL(str(path))
        version = library.gradlane_abi()
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded: {error}"
    if version != ABI:
        return None, f"{path.name} was built from another version; install again"
    return library, ""
