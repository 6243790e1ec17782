"""Seconds of a step, and memory: what no emulation knows."""

import contextlib
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.kernels.triton_state import VARIABLE

STRATEGIES = (
    None,  # DDP without a hook
    "Mean()",
    "Cast(Mean(), bfloat16)",
    "ErrorFeedback(Sharded(Int8()))",
    "ErrorFeedback(Sharded(Int4()))",
    "ErrorFeedback(Gathered(Sign()))",
    "ErrorFeedback(Gathered(TopK(0.01)))",
    "ErrorFeedback(PowerSGD(4))",
)
IN_TRITON = [text for text in STRATEGIES if text is not None and ("Int" in text or "Sign" in text)]
WIDTH, DEPTH, BATCH = 2048, 12, 256  # 50 million parameters
STEPS = 20


def step_times(machine):
    """(strategy, milliseconds of a step, MiB beyond those of DDP, ratio of bytes). With kernels in Triton,
    and once more in plain torch where that makes a difference."""
    found, usual = [], 0
    for text in STRATEGIES:
        seconds, memory, ratio = _measured(machine, text)
        usual = usual or memory
        found.append((text or "DDP without a hook", seconds * 1000, (memory - usual) / 2**20, ratio))
    with plain_torch():
        for text in IN_TRITON:
            seconds, memory, ratio = _measured(machine, text)
            found.append((f"{text}, plain torch", seconds * 1000, (memory - usual) / 2**20, ratio))
    return found


@contextlib.contextmanager
def plain_torch():
    before = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = "0"
    yield
    os.environ[VARIABLE] = before


def _measured(machine, text):
    """(seconds of a step, bytes in use, ratio of bytes sent)."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(machine.device))
    attachment = None if text is None else gl.attach(ddp, text)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH, device=machine.device)

    def step():
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    machine.seconds(step, 5)
    seconds, memory = machine.seconds(step, STEPS), machine.memory()
    ratio = 1.0 if attachment is None else attachment.metrics()["comm/ratio"]
    if attachment is not None:
        attachment.close()
    return seconds, memory, ratio
