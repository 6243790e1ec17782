"""Whether kernels in Triton may run on a device, and why not."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ..core.streams import has_streams
from ..log import log
from .native import VARIABLE as KERNELS

VARIABLE = "GRADLANE_TRITON"
INTERPRETER = "TRITON_INTERPRET"

_trusted: set[tuple[str, torch.device]] = set()
refused: dict[tuple[str, torch.device], str] = {}
"""By kernel and device: why plain torch does its work, although Triton is installed."""


def refuse(kernel: str, device: torch.device, why: str) -> None:
    """From now on plain torch does it, which is said once. The bits are the same, so no other rank has to
    know."""
    _trusted.discard((kernel, device))
    if (kernel, device) not in refused:
        refused[kernel, device] = why
        log.warning("%s on %s: the kernels in Triton are not used, plain torch is: %s", kernel, device, why)


def why_not(device: torch.device) -> str | None:
    """Why no kernel in Triton runs on this device; None if they may."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if os.environ.get(KERNELS) == "torch":
        return f"{KERNELS}=torch"
    interpreted = os.environ.get(INTERPRETER) == "1" and has_streams(device)
    if device.type != "cuda" and not interpreted:
        return f"not for {device.type}"
    return "Triton is not installed" if kernels() is None else None


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The package ``gpu``, or None without Triton."""
    if find_spec("triton") is None:
        return None
    try:
        from . import gpu
        from .gpu import blocks, elementwise, lowrank, topk  # noqa: F401
    except Exception as error:  # noqa: BLE001  a Triton that is broken is as good as none
        log.warning("Triton is installed, but cannot be imported: %s", error)
        return None
    return gpu


def trusts(kernel: str, device: torch.device, check: Callable[[], bool]) -> bool:
    """Whether this kernel may run on this device. Before its first use there ``check`` compares its bits with
    those of plain torch, and the host waits for that."""
    if (kernel, device) in _trusted:
        return why_not(device) is None
    if (kernel, device) in refused or why_not(device) is not None or not may_wait(device):
        return False
    try:
        if check():
            _trusted.add((kernel, device))
            return True
        refuse(kernel, device, "its bits are not those of plain torch")
    except Exception as error:  # noqa: BLE001  a compiler may raise anything
        refuse(kernel, device, _short(error))
    return False


def attempt(kernel: str, device: torch.device, call: Callable[[], object]) -> bool:
    """Call a trusted kernel. It may be compiled once more, for another alignment: if that fails the answer is
    False, and nothing was written."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  a compiler may raise anything
        refuse(kernel, device, _short(error))
        return False
    return True


def _short(error: Exception) -> str:
    """Compilers say a lot."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"


def may_wait(device: torch.device) -> bool:
    """Whether the host may wait for the device: not while a CUDA graph is captured."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def device_kernels_in_use(device: torch.device) -> str:
    """Which kernels run on a device: ``Triton 3.5.0``, or ``torch (REASON)``; and which were refused."""
    if (reason := why_not(device)) is not None:
        return f"torch ({reason})"
    found = [f"; torch for {kernel} ({why})" for (kernel, on), why in refused.items() if on == device]
    return f"Triton {import_module('triton').__version__}" + "".join(found)
