"""A resume on a device has the bits of a run that never stopped, although a file is read to the CPU."""

import numpy as np
import pytest

from .ranks import needs_compiler, run, some_of, train

pytestmark = needs_compiler

STRATEGIES = (
    "ErrorFeedback(Sharded(Int8()))",
    "ErrorFeedback(PowerSGD(2, min_compression_rate=1))",
    "ErrorFeedback(AcpSGD(2, min_compression_rate=1))",
    "EF21(Gathered(TopK(0.2)))",
    "DGC(0.1)",
)


def stopped(rank, strategy, folder):
    """Three steps, a checkpoint, and the same three steps again: with the state from the file."""

    def between(attachment, ddp, step, rank):
        if step == 2:
            attachment.save(folder)

    def reload(attachment, ddp, step, rank):
        if step == 3:
            attachment.load(folder)

    without = train(rank, strategy, steps=6, cap=0.03)
    with_stop = train(rank, strategy, steps=6, cap=0.03, between=between, faults=reload)
    return without, with_stop


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, STRATEGIES[1]))
def test_a_resumed_run_has_the_same_bits_and_waits_no_more(strategy, tmp_path):
    for without, with_stop in run(stopped, 2, strategy, str(tmp_path / "checkpoint")):
        assert (with_stop.races, with_stop.errors) == ([], [])
        assert np.array_equal(with_stop.weights, without.weights)
        assert with_stop.waits == without.waits
