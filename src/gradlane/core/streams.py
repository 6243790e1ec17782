"""Devices whose kernels run later than they are called, in the order of streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import WrongState

ORDERED = ("cpu", "meta", "mps")
"""Devices on which the order of calls is the order of all kernels."""


def has_streams(device: torch.device) -> bool:
    return device.type not in ORDERED


def devices_of_futures(device: torch.device) -> list[int | str | torch.device]:
    """``Future(devices=...)`` for results on this device: whoever waits is ordered after its kernels."""
    return [device] if has_streams(device) else []


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Kernels that are called inside run on this stream. ``with stream`` itself came with torch 2.7."""
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        if index != torch.accelerator.current_device_index():
            torch.accelerator.set_device_index(index)


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of some numbers of the host, for which the host does not wait."""
    if not has_streams(device):
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Matrix products inside are in full fp32, whatever ``torch.set_float32_matmul_precision`` says: with
    TF32 what is kept of a gradient and what was sent of it would not add up to it any more."""
    usual = torch.get_float32_matmul_precision()
    if usual == "highest" or not has_streams(device):
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(usual)


def refuse_capture(device: torch.device) -> None:
    """A CUDA graph would repeat the seeds, step numbers and buffers of the step that was captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WrongState(
            "a strategy cannot be part of a CUDA graph: a replay would repeat the random numbers and the "
            "memory of one step. Capture forward and backward of the module under no_sync(), or nothing"
        )


def used_by_current_stream(tensor: Tensor) -> None:
    """The current stream uses a tensor that another stream has allocated. Without this, the memory of a
    tensor that is dropped could be given to another one before the current stream is done with it."""
    if has_streams(tensor.device) and not tensor.is_sparse:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
