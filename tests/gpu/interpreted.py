"""What tests run in Triton's interpreter, on the emulated device: ``python -m tests.gpu.interpreted NAME``.

In a process of its own, since Triton decides at its import whether it interprets. Each function's answer is
printed as JSON.
"""

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import gradlane as gl
from gradlane.codecs.blockwise import BlockCodec
from gradlane.kernels import triton_blocks, triton_state
from gradlane.log import log

from ..support.codecs import CODECS
from .costs import cost_of
from .ranks import run, train
from .test_codecs import ALL, LARGE, QUICK, differences_of

ROOT = Path(__file__).parents[2]
BLOCKS = [name for name, codec in CODECS.items() if isinstance(codec, BlockCodec)]
IN_TRITON = [*BLOCKS, *(name for name, codec in CODECS.items() if isinstance(codec, gl.TopK))]
SOME = ("topk bfloat16", "int4 rotated stochastic", "sign", "fp8 e5m2")
SWITCHES = {"TRITON_INTERPRET": "1", "GRADLANE_KERNELS": "", "GRADLANE_TRITON": ""}
MOST = (*(case for case in ALL if case[0] != LARGE), (LARGE, "broken"))  # the interpreter is slow
MANY_ELEMENTS = 1 << 16  # of one program: the interpreter takes as long for a few


missing = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(missing, reason="triton is not installed: make test-triton")


def in_interpreter(name, *arguments):
    """The answer of one of the functions below."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **SWITCHES}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def launches():
    kernels = importlib.import_module(f"{__package__}.device").log.kernels
    return [kernel.name for kernel in kernels if kernel.name.startswith("triton")]


def bits(which):
    """By codec: the cases whose bits are not those of the CPU, how often Triton ran, and what it did."""
    names, cases = (SOME, QUICK) if which == "some" else (IN_TRITON, MOST)
    (found,) = run(_bits, 1, names, cases, deadline=900)
    return found


def _bits(rank, names, cases):
    device, found = importlib.import_module(f"{__package__}.device"), {}
    for name in names:
        device.log.clear()
        wrong = differences_of(CODECS[name], cases)
        found[name] = wrong, len(launches()), len(triton_state.refused), device.races()[:3]
    return found


def costs(*texts):
    (found,) = run(_costs, 1, texts, deadline=300)
    return found


def _costs(rank, texts):
    triton_blocks.ELEMENTS = MANY_ELEMENTS
    found = {}
    for text in texts:
        cost = cost_of(text, width=512)
        found[text] = cost.kernels, cost.bytes_per_element, sum(cost.waits.values()), launches()
    return found


def refusals(*faults):
    (found,) = run(_refusals, 1, faults, deadline=60)
    return found


def _refusals(rank, faults):
    """By fault: (refused before, refused after, wrong results, launches afterwards, warnings)."""
    device, codecs = importlib.import_module(f"{__package__}.device"), iter((gl.Int8(), gl.Int4(), gl.Sign()))
    found, warned = {}, Warned()
    log.addHandler(warned)
    for fault in faults:
        codec = next(codecs)
        if fault.startswith("later "):
            codec.prepare(device.DEVICE)
        before = str(codec) in [name for name, _ in triton_state.refused]
        with FAULTS[fault.removeprefix("later ")]():
            wrong = differences_of(codec, QUICK[1:3])
        after = str(codec) in [name for name, _ in triton_state.refused]
        device.log.clear()
        wrong += differences_of(codec, QUICK[1:3])
        found[fault] = before, after, wrong, len(launches()), warned.taken()
    return found


class Warned(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self._messages = []

    def emit(self, record):
        self._messages.append(record.getMessage())

    def taken(self):
        messages, self._messages = self._messages, []
        return messages


@contextlib.contextmanager
def wrong_bits():
    """To add this number rounds to halves."""
    codes = importlib.import_module("gradlane.kernels.gpu.codes")
    right = codes.TO_WHOLE
    codes.TO_WHOLE = type(right)(right.value / 2)
    yield
    codes.TO_WHOLE = right


@contextlib.contextmanager
def broken():
    """As a kernel that does not compile: its launch raises."""
    blocks = importlib.import_module("gradlane.kernels.gpu.blocks")
    right, blocks.packed = blocks.packed, None
    yield
    blocks.packed = right


FAULTS = {"wrong bits": wrong_bits, "broken": broken}


def training(text):
    """Real DDP on two ranks: (weights as in plain torch, no races, waits as in plain torch, kernels were
    checked before the first step and trusted, launches, metrics)."""
    return run(_training, 2, text, deadline=200)


def _training(rank, text):
    device, trusted = importlib.import_module(f"{__package__}.device"), []

    def note(attachment, ddp, step, rank):
        trusted.append(set(triton_state._trusted))

    found = train(rank, text, faults=note, between=note)
    count = len(launches())
    os.environ[triton_state.VARIABLE] = "0"
    plain = train(rank, text)
    same = bool(np.array_equal(found.weights, plain.weights))
    early = len(trusted[0]) > 2 and trusted[0] == trusted[-1] and not triton_state.refused
    figures = [each.metrics["comm/compiled_kernels"] for each in (found, plain)]
    return same, not device.races() and not found.races, found.waits == plain.waits, early, count, figures


def lowrank():
    """Differences from a CPU, launches, refusals and races: as it is, and with a kernel that is wrong."""
    (found,) = run(importlib.import_module("tests.gpu.test_lowrank").in_triton, 1, deadline=100)
    return found


def cast():
    (found,) = run(importlib.import_module("tests.gpu.test_cast").differences, 1)
    return found


def first_run():
    """The check of the first run on GPUs: (verdict, words), as it is and with wrong bits."""
    (found,) = run(_first_run, 1, deadline=200)
    return found


def _first_run(rank):
    checks = importlib.import_module("tests.gpu.first_run.checks")
    triton_blocks.ELEMENTS, checks.SIZES_OF_TRITON = MANY_ELEMENTS, (10_003,)
    machine = importlib.import_module("tests.gpu.first_run.machine").Emulated(rank)
    found = []
    for fault in (contextlib.nullcontext, wrong_bits):
        with fault():
            try:
                words = checks.Checks(machine, rank, None).triton_has_the_bits_of_plain_torch()
                found.append(("passed", words))
            except AssertionError as error:
                found.append(("failed", str(error)))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy's, of numbers that are not finite
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
