"""The script for a first run on GPUs, on the emulated device: its checks pass, and can fail."""

import pytest

from gradlane.core.memory import Memory

from .first_run import report
from .first_run.__main__ import run_checks
from .first_run.checks import ALL
from .first_run.machine import Emulated
from .interpreted import in_interpreter, needs_triton
from .ranks import needs_compiler, run

pytestmark = needs_compiler


def checked(rank, names, mutate=None):
    if mutate is not None:
        mutate()
    return run_checks(Emulated(rank), rank, names)


@pytest.mark.slow
def test_all_checks_pass(tmp_path):
    results, *others = run(checked, 2, ALL, deadline=280)
    assert [(name, verdict) for name, verdict, _ in results] == [(name, "passed") for name in ALL]
    assert others == [results]
    times = [("Mean()", 12.3, 0.0, 1.0)]
    report.write(tmp_path / "report.md", {"torch": "2.13"}, 2, results, times)
    page = (tmp_path / "report.md").read_text()
    assert "| replicas are equal | passed | 9 strategies, four steps each |" in page
    assert "| `Mean()` | 12.3 | 0 | 1.00 |" in page


def forgets():
    """A strategy's memory is lost when it is loaded."""
    load = Memory.load_state_dict
    Memory.load_state_dict = lambda self, state: load(self, {})


def test_a_check_fails_where_something_is_wrong():
    names = ("a_resume_has_the_same_bits", "a_step_that_is_not_finite_is_skipped")
    (found, _) = run(checked, 2, names, forgets)
    (name, verdict, words), (_, other, _) = found
    assert (name, verdict, other) == ("a_resume_has_the_same_bits", "failed", "passed")
    assert all("other bits after a resume" in text for text in words)


@needs_triton
@pytest.mark.slow
def test_kernels_in_triton_are_compared_with_plain_torch():
    (verdict, words), (other, why) = in_interpreter("first_run")
    assert verdict == "passed", words
    assert "all block codecs" in words
    assert other == "failed"
    assert why.startswith("other bits than in plain torch: int2 of 10003, int2 rotated of")
