"""The device that the checks run on, and what they need to know of it."""

import contextlib
import importlib
import platform
import warnings

import torch

import gradlane as gl
from gradlane.kernels.triton_state import device_kernels_in_use

PAUSE = 20_000_000  # clock cycles: ten milliseconds or so, longer than a step of the checks


class Cuda:
    """The GPU of this rank."""

    backend = "nccl"
    name = "cuda"

    def __init__(self, rank):
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)

    def pause(self):
        """A kernel that does nothing for a while, on the current stream."""
        torch.cuda._sleep(PAUSE)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def counted_waits(self):
        """A list of the places where the host waited."""
        found = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message).lower()]

    def seconds(self, work, times):
        """Of one call, on the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / times

    def memory(self):
        return torch.cuda.memory_allocated(self.device)

    def environment(self):
        gpu = torch.cuda.get_device_properties(self.device)
        return {
            "gradlane": gl.__version__,
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "kernels": device_kernels_in_use(self.device),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "GPU": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}",
            "Python": platform.python_version(),
            "system": platform.platform(),
        }


class Emulated:
    """The device of these tests, on which the checks themselves are checked."""

    backend = name = "emulated"

    def __init__(self, rank):
        self._module = importlib.import_module("tests.gpu.device")
        self.device = self._module.DEVICE

    def pause(self):
        """Order is what its clocks check, whatever the time."""

    def synchronize(self):
        torch.accelerator.synchronize()

    @contextlib.contextmanager
    def counted_waits(self):
        found = []
        self._module.log.clear()
        yield found
        found += [where for (_, where), count in self._module.log.waits.items() for _ in range(count)]

    def environment(self):
        return {"gradlane": gl.__version__, "torch": torch.__version__, "device": "emulated"}
