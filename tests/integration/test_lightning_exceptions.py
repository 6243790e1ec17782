"""What is seen and what is left when something raises in a Trainer of Lightning's."""

import os
import time

import pytest

lightning = pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from gradlane.errors import PeerFailed, WrongState  # noqa: E402
from gradlane.integrations.lightning import GradientComm  # noqa: E402

from .launched import FILES, MEMORY, batches_of, files_in, ranks  # noqa: E402
from .lightning_runs import Module, trainer  # noqa: E402

BAD = 3  # the step in which it happens
SAVERS = {
    "nothing": lambda folder: [],
    "on_exception": lambda folder: [OnExceptionCheckpoint(folder, "last")],
    "save_on_exception": lambda folder: [ModelCheckpoint(folder, "last", save_on_exception=True)],
}


class Unlucky(Module):
    def __init__(self, where, unlucky):
        super().__init__()
        self.where, self.unlucky = where, int(os.environ["RANK"]) in unlucky

    def training_step(self, batch, index):
        if self.unlucky and index == BAD and self.where == "forward":
            fail()
        if self.unlucky and index == BAD and self.where == "backward":
            # The gradients of the last layer are there by then, those of the first are not.
            self.network[1].register_forward_hook(lambda module, inputs, output: watch(output))
        return super().training_step(batch, index)


def watch(output):
    output.register_hook(fail)


def fail(*_):
    raise OSError("no more data here")


def unlucky(rank, folder, where, who, saver):
    module, comm = Unlucky(where, who), GradientComm(MEMORY, timeout=60)
    run = trainer(comm, *SAVERS[saver](folder), strategy=DDPStrategy(bucket_cap_mb=0.0002))
    began = time.monotonic()
    with pytest.raises((OSError, PeerFailed)) as caught:
        run.fit(module, batches_of(rank))
    with pytest.raises(WrongState, match="closed"):
        comm.attachment.swap("Mean()")
    seconds = time.monotonic() - began
    return type(caught.value).__name__, getattr(caught.value, "__notes__", []), seconds


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_ends_all_of_them_and_is_what_is_seen(where, saver, tmp_path):
    (first, _, seconds), (second, notes, _) = ranks(unlucky, tmp_path, where, (1,), saver)
    assert (first, second) == ("PeerLost", "OSError")
    assert seconds < 30
    if saver != "nothing":  # the ranks are in different steps: the checkpoint has nothing of them
        (note,) = [note for note in notes if "has no memory of the ranks" in note]
        assert str(tmp_path / "last.ckpt") in note
        assert "differ in step" in note or "middle of a step" in note
        assert "GradientComm(..., resume=False)" in note
        assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_all_ranks_raise_between_two_steps_leaves_a_whole_checkpoint(tmp_path):
    found = ranks(unlucky, tmp_path, "forward", (0, 1), "save_on_exception")
    assert [(name, notes) for name, notes, _ in found] == [("OSError", [])] * 2
    assert files_in(tmp_path / "last.ckpt.gradlane") == FILES
