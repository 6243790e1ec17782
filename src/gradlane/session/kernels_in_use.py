"""Which kernels a strategy will have on a device: found out when it is attached, not in its first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..codecs.base import Codec
from ..core.strategy import Strategy, parts, public_fields
from ..core.streams import has_streams
from ..errors import InvalidValue
from ..kernels import elementwise, triton_lowrank
from ..kernels.native import kernels_in_use
from ..kernels.triton_state import device_kernels_in_use
from ..strategies.lowrank.acpsgd import AcpSGD
from ..strategies.lowrank.powersgd import PowerSGD

LOW_RANK = (PowerSGD, AcpSGD)


def prepare_kernels(strategy: Strategy, device: torch.device) -> None:
    """Check the kernels of a device against plain torch: the host waits for that."""
    if not has_streams(device):
        return
    elementwise.prepare(device)
    if any(isinstance(part, LOW_RANK) for part in parts(strategy)):
        triton_lowrank.prepare(device)
    for codec in codecs_of(strategy):
        codec.prepare(device)


def codecs_of(strategy: Strategy) -> Iterator[Codec]:
    for part in parts(strategy):
        for _, _, value in public_fields(part):
            if isinstance(value, Codec):
                yield value


def kernels_on(device: torch.device) -> str:
    """In words, for the telemetry."""
    try:
        return device_kernels_in_use(device) if has_streams(device) else kernels_in_use()
    except InvalidValue as error:  # of the environment; whoever calls a kernel gets it
        return f"none ({error})"


def kernel_figures(device: torch.device) -> dict[str, float]:
    """For the metrics."""
    return {"comm/compiled_kernels": float(kernels_on(device).startswith(("C,", "Triton")))}
