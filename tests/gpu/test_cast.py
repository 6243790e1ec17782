"""``Cast`` divides in the pass that narrows on a device: with the bits and the figures of the CPU."""

import importlib

import pytest
import torch

import gradlane as gl
from gradlane.core.bucket import Bucket, Layout, Slot
from gradlane.core.running import Running
from gradlane.core.scratch import Scratch

from .costs import OneBucket
from .interpreted import in_interpreter, needs_triton
from .ranks import needs_compiler, run
from .test_codecs import same

pytestmark = needs_compiler
NUMEL, WORLD = 5000, 3


def reduced(dtype, device):
    """(mean, figures) of a bucket with numbers that overflow fp16, and some that vanish."""
    flat = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    flat[::7] *= 1e-9
    flat[3], flat[5], flat[9], flat[11] = 4e5, 1.5e5, torch.inf, torch.nan
    layout = Layout((Slot("w", torch.Size((NUMEL,))),))
    bucket = Bucket(flat=flat.to(device), layout=layout, step=0, rank=1, world=WORLD, scratch=Scratch())
    figures, driver = {}, OneBucket(WORLD, 1)
    running = Running(gl.Cast(gl.Mean(), dtype), bucket, lambda bucket, note: figures.update(note.figures))
    with torch.no_grad():
        running.resume()
        driver.advance(running)
        driver.meet([running])
    return driver.reduced.mean, {name: float(value) for name, value in figures.items()}


def differences(rank):
    device, found = importlib.import_module(f"{__package__}.device"), {}
    for dtype in (torch.bfloat16, torch.float16):
        device.log.clear()
        (own, figures), (mean, expected) = reduced(dtype, device.DEVICE), reduced(dtype, "cpu")
        launched = sum(kernel.name.startswith("triton") for kernel in device.log.kernels)
        found[str(dtype)] = same(own, mean), figures == expected, expected, launched
    return found


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=[needs_triton, pytest.mark.slow])])
def test_bits_and_figures_are_those_of_the_cpu(triton):
    found = in_interpreter("cast") if triton else run(differences, 1)[0]
    for equal, counted, _, _ in found.values():
        assert (equal, counted) == (True, True)
    *_, figures, launched = found["torch.float16"]
    assert figures["overflow"] == 1
    assert figures["underflow"] > NUMEL / 20
    assert (launched > 0) == triton
