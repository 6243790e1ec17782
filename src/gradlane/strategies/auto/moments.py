"""When a step begins: a reading of a clock, or a place in the work of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Moment(Protocol):
    """A moment less an earlier one is seconds."""

    def __sub__(self, earlier: Any, /) -> float: ...


Clock = Callable[[], Moment]


class DeviceMoment:
    """When the current stream comes to this place. The host is ahead of a device, by several steps
    where nothing makes it wait, so its own clock does not tell what steps take there."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device, enable_timing=True)
        self._event.record(torch.accelerator.current_stream(device))

    def __sub__(self, earlier: DeviceMoment) -> float:
        """The host waits for this moment."""
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000
