"""The kernels in Triton: their bits in its interpreter, what becomes of one that is wrong, and that they
compile for several GPUs."""

import json
import subprocess
import sys

import pytest

from .interpreted import BLOCKS, IN_TRITON, ROOT, SOME, in_interpreter, needs_triton
from .ranks import needs_compiler

pytestmark = needs_triton


@needs_compiler
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_bits_are_those_of_the_cpu(which):
    found = in_interpreter("bits", which)
    assert set(found) == set(SOME if which == "some" else IN_TRITON)
    assert {name: wrong for name, (wrong, *_) in found.items() if wrong} == {}
    assert all(launches > 3 and not refused and not races for _, launches, refused, races in found.values())


@needs_compiler
def test_a_kernel_that_is_wrong_or_does_not_compile_is_refused():
    found = in_interpreter("refusals", "wrong bits", "broken", "later broken")
    for name, (before, after, wrong, launches, _) in found.items():
        assert (before, after, wrong, launches) == (False, True, [], 0), name
    ((bits,), (raised,), (later,)) = (warnings for *_, warnings in found.values())
    assert bits.startswith("Int8(block=512, rounding='nearest', rotate=False) on ")
    assert "plain torch is: its bits are not those of plain torch" in bits
    assert "Int4(" in raised
    assert "not callable" in raised
    assert "Sign(" in later


@needs_compiler
def test_training_has_the_same_bits_and_checks_kernels_before_the_first_step():
    for same, ordered, waits, early, launches, figures in in_interpreter(
        "training", "ErrorFeedback(Sharded(Int8(block=32)))"
    ):
        assert (same, ordered, waits, early, figures) == (True, True, True, True, [1.0, 0.0])
        assert launches > 3


@pytest.mark.slow
def test_they_compile_without_anything_inexact():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiled"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, inexact = json.loads(done.stdout.splitlines()[-1])
    assert count > 6 * 5 * len(BLOCKS)
    assert inexact == {}
