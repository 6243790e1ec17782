"""Environment variables that break something, or may be worth a try."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from .finding import Finding

SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
MOST_SOCKETS = 64  # threads times sockets, by NCCL's documentation


def look_at_environment(
    environ: Mapping[str, str], *, nccl: bool | None = None, cuda_build: bool | None = None
) -> list[Finding]:
    """What is not set, or does no harm, is not mentioned."""
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
            Finding("environment", "broken", crash, "use INFO; gradlane compares what ranks do by itself")
        ]
    if level == "DETAIL":
        return [
            Finding("environment", "costs", f"{what} checks every collective", "unset it when all is well")
        ]
    return []


def _nccl(environ: Mapping[str, str]) -> list[Finding]:
    if environ.get("NCCL_IB_DISABLE") == "1" or not any(environ.get(name) for name in SOCKETS):
        return [
            Finding(
                "NCCL",
                "note",
                "NCCL uses few TCP connections between hosts by default",
                "on fast Ethernet try NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, and measure",
            )
        ]
    threads, sockets = (_number(environ.get(name)) for name in SOCKETS)
    if threads * sockets > MOST_SOCKETS:
        what = f"{SOCKETS[0]} x {SOCKETS[1]} = {threads * sockets}"
        return [Finding("NCCL", "broken", what, f"their product may be {MOST_SOCKETS} at most")]
    return []


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 1
