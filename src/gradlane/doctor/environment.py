"""Environment variables that break something, or are worth a measurement."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from .finding import Finding

SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
MOST_THREADS = 16  # these limits are in NCCL's documentation; above them NCCL warns and uses less
MOST_SOCKETS = 64  # threads times sockets per thread


def check_environment(
    environ: Mapping[str, str], *, nccl: bool | None = None, cuda_build: bool | None = None
) -> list[Finding]:
    """Findings on variables that are set and do harm, and on NCCL's sockets."""
    nccl = (
        dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
        if nccl is None
        else nccl
    )
    cuda_build = torch.version.cuda is not None if cuda_build is None else cuda_build
    return [*_debugging(environ, cuda_build), *(_nccl(environ) if nccl else [])]


def _debugging(environ: Mapping[str, str], cuda_build: bool) -> list[Finding]:
    level = environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
    what = f"TORCH_DISTRIBUTED_DEBUG={level}"
    if level == "DETAIL" and not cuda_build:
        crash = f"{what} makes DDP's constructor crash in CPU builds of torch (seen with 2.13)"
        return [
            Finding("environment", "broken", crash, "use INFO; gradlane itself compares what the ranks do")
        ]
    if level == "DETAIL":
        return [
            Finding(
                "environment",
                "costs",
                f"{what} checks every collective",
                "unset it when you are done debugging",
            )
        ]
    return []


def _nccl(environ: Mapping[str, str]) -> list[Finding]:
    chosen = {name: environ[name] for name in SOCKETS if environ.get(name)}
    network = environ.get("NCCL_NET", "Socket")
    if network.lower() != "socket":  # InfiniBand's verbs, or a plugin
        what = f"NCCL_NET={network}, and {' and '.join(chosen)} is for TCP sockets"
        advice = "InfiniBand ignores it; what a plugin does with it is in the plugin's documentation"
        return [Finding("NCCL", "note", what, advice)] if chosen else []
    if not chosen:
        what = "NCCL sends over one TCP socket for each connection by default (more on AWS and Google Cloud)"
        advice = (
            f"on Ethernet of 100 Gbit/s try {SOCKETS[0]}=4 {SOCKETS[1]}=4, and measure; InfiniBand "
            "ignores them"
        )
        return [Finding("NCCL", "note", what, advice)]
    threads, sockets = (_number(environ.get(name)) for name in SOCKETS)
    if threads > MOST_THREADS:
        advice = f"NCCL takes {MOST_THREADS} at most"
        return [Finding("NCCL", "note", f"{SOCKETS[0]}={threads}", advice)]
    if threads * sockets > MOST_SOCKETS:
        what = f"{SOCKETS[0]} x {SOCKETS[1]} = {threads * sockets}"
        advice = f"NCCL takes {MOST_SOCKETS} at most: {SOCKETS[1]}={MOST_SOCKETS // threads}"
        return [Finding("NCCL", "note", what, advice)]
    return []


def _number(text: str | None) -> int:
    """1 is NCCL's default, except on some clouds."""
    return int(text) if text and text.isdigit() else 1
