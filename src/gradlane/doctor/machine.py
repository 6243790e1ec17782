"""Checks of torch, the kernels and the processors."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..errors import InvalidValue
from ..kernels.native import kernels_in_use
from ..kernels.triton_state import device_kernels_in_use
from .finding import Finding, fine

OLDEST = (2, 6)


def check_machine(ranks_here: int | None, environ: Mapping[str, str]) -> list[Finding]:
    """``ranks_here``: how many ranks of the job share this machine; None if there is no job."""
    return [
        _torch(),
        _kernels(),
        *gpu_kernels(_gpus()),
        threads_finding(ranks_here, torch.get_num_threads(), cores(), environ),
    ]


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torch() -> Finding:
    version = str(torch.__version__)
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if _available(name)]
    what = f"{version}, Python {platform.python_version()}; backends: {', '.join(backends) or 'none'}"
    if not backends:
        return Finding("torch", "broken", what, "install a torch that was built with torch.distributed")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return Finding("torch", "broken", what, "gradlane needs torch 2.6 or newer")
    return fine("torch", what)


def _available(backend: str) -> bool:
    return dist.is_available() and bool(getattr(dist, f"is_{backend}_available", lambda: False)())


def _kernels() -> Finding:
    try:
        used = kernels_in_use()
    except InvalidValue as error:
        return Finding("kernels", "broken", str(error), "unset GRADLANE_KERNELS")
    if used.startswith("C"):
        return fine("kernels", used)
    advice = "codecs take several times as long in plain torch; install a C compiler, and gradlane again"
    if os.environ.get("GRADLANE_KERNELS") == "torch":
        advice = "codecs take several times as long in plain torch; unset GRADLANE_KERNELS"
    return Finding("kernels", "costs", used, advice)


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def gpu_kernels(devices: list[torch.device]) -> list[Finding]:
    """One finding for all devices, if there are any."""
    used = sorted({device_kernels_in_use(device) for device in devices})
    if not used:
        return []
    words = " / ".join(used)
    if all(each.startswith("Triton") for each in used):
        return [fine("GPU kernels", words)]
    advice = "codecs make many passes over memory in plain torch; install triton, and unset GRADLANE_TRITON"
    return [Finding("GPU kernels", "costs", words, advice)]


def threads_finding(ranks: int | None, threads: int, count: int, environ: Mapping[str, str]) -> Finding:
    chosen = environ.get("OMP_NUM_THREADS")
    source = f"OMP_NUM_THREADS={chosen}" if chosen else "OMP_NUM_THREADS is not set"
    many, have = _counted(threads, "thread"), _counted(count, "core")
    if ranks is None:
        advice = "torchrun sets OMP_NUM_THREADS=1; better: cores / ranks"
        return Finding("threads", "note", f"{have}, {many} ({source})", advice)
    what = f"{have} for {_counted(ranks, 'rank')}, {many} each ({source})"
    share = max(1, count // ranks)
    if ranks > count:
        return Finding("threads", "note", what, "more ranks than cores: times measured here mean little")
    if ranks * threads > count:
        return Finding("threads", "costs", what, f"threads compete for cores: set OMP_NUM_THREADS={share}")
    if threads < share:
        return Finding(
            "threads", "note", what, f"OMP_NUM_THREADS={share} would use all cores; torchrun sets 1"
        )
    return fine("threads", what)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
