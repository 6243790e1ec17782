"""What one bucket costs on a device: kernels, bytes, and waits of the host, with real numbers."""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.bucket import Bucket, Layout, Slot
from gradlane.core.running import Driver, Running
from gradlane.core.scratch import Scratch
from gradlane.core.strategy import is_undoable, named_states
from gradlane.lane.perform import perform_on_stream

LARGEST_BLOCK = 4096
TINY = 65_536  # bytes; a kernel on less is over before the next one starts


class Done:
    def wait(self):
        return True


class Echo:
    """A group whose other ranks send what this one sends."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def allreduce(self, tensors, how):
        return Done()

    def allgather(self, outputs, inputs):
        for output in outputs[0]:
            output.copy_(inputs[0])
        return Done()

    def alltoall_base(self, output, given, output_splits, input_splits):
        own = torch.split(given, input_splits)[self._rank - 1]  # its part for itself may be empty
        for part in torch.split(output, output_splits):
            part.copy_(own)
        return Done()

    def _reduce_scatter_base(self, output, given, how):
        output.copy_(given.view(self._size, -1)[self._rank])
        return Done()


class OneBucket(Driver):
    def __init__(self, world, rank):
        self._group = Echo(rank, world)

    def perform(self, running, request):
        return perform_on_stream(self._group, request, running.bucket.divisor(request.over))

    def finished(self, running, reduced):
        self.reduced = reduced


@dataclass
class Cost:
    kernels: int
    tiny: int
    bytes_per_element: float
    waits: dict

    def __str__(self):
        count = sum(self.waits.values())
        size = f"{self.bytes_per_element:.0f} B/element"
        return f"{self.kernels} kernels ({self.tiny} tiny), {size}, {count} waits"


def cost_of(strategy, *, width=1024, world=4, steps=3):
    """Of the last of some steps; the exchange itself is left out."""
    device, rank = sys.modules[f"{__package__}.device"], 1
    shapes = {"w": (width, width), "b": (width,), "v": (width, width // 2)}
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    shapes["c"] = (-numel % (world * LARGEST_BLOCK) or LARGEST_BLOCK,)  # shards of one size
    layout, scratch = Layout(Slot(name, torch.Size(shape)) for name, shape in shapes.items()), Scratch()
    numel = sum(slot.numel for slot in layout)
    strategy = gl.strategies.text.parse(strategy) if isinstance(strategy, str) else strategy
    states = [leaf.state for leaf in named_states(strategy) if is_undoable(leaf.state)]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        flat = torch.randn(numel, generator=generator).mul_(torch.rand(numel, generator=generator).pow_(4))
        bucket = Bucket(
            flat=flat.to(device.DEVICE), layout=layout, step=step, rank=rank, world=world, scratch=scratch
        )
        for state in states:
            state.undoable = True
        driver = OneBucket(world, rank)
        running = Running(strategy, bucket, lambda bucket, note: None)
        device.log.clear()
        with torch.no_grad():
            running.resume()
            driver.advance(running)
            driver.meet([running])
        for state in states:
            state.keep()
    kernels = [kernel for kernel in device.log.kernels if "_base" not in kernel.where]
    return cost_in(device.log, kernels, numel)


def cost_in(log, kernels, numel):
    moved = sum(kernel.bytes for kernel in kernels)
    tiny = sum(kernel.bytes < TINY for kernel in kernels)
    return Cost(len(kernels), tiny, moved / numel, dict(log.waits))


HOOKS = {
    "allreduce_hook": (default_hooks.allreduce_hook, lambda: None),
    "bf16_compress_hook": (default_hooks.bf16_compress_hook, lambda: None),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, lambda: None),
    "powerSGD_hook, rank 4": (
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
    ),
}


def cost_of_torch_hook(rank, name, width=512):
    """The same for a hook of torch's own, on real ranks."""
    device, found = sys.modules[f"{__package__}.device"], []
    hook, state = HOOKS[name]

    def counted(state, bucket):
        device.log.clear()
        future = hook(state, bucket)
        future.wait()
        found.append(cost_in(device.log, device.log.kernels, bucket.buffer().numel()))
        return future

    layers = nn.Linear(width, width, bias=False), nn.Linear(width, width // 2, bias=False)
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device.DEVICE), bucket_cap_mb=1000)
    ddp.register_comm_hook(state(), counted)
    for _ in range(4):  # the first buckets are others, and PowerSGD begins after two steps
        ddp(torch.ones(4, width).to(device.DEVICE)).sum().backward()
    return found[-1]
