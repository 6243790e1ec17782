"""``Attachment.save`` and ``load`` in real processes: who may load what, and what happens if that fails."""

import errno
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.strategy import shared_state
from gradlane.local import run_ranks

from ..support.checkpoints import OLD_CHECKPOINT, SMALL
from ..support.training import ComplexWeights, SparseLookup, build, data, flat, replicas_equal

FEEDBACK = "ErrorFeedback(Gathered(TopK(ratio=0.1)))"


def attached(strategy=FEEDBACK, module=None, cap=SMALL, timeout=20):
    ddp = DistributedDataParallel(build() if module is None else module, bucket_cap_mb=cap)
    return ddp, gl.attach(ddp, strategy, timeout=timeout)


def steps(rank, ddp, attachment, count):
    for step in range(attachment.step, attachment.step + count):
        ddp.zero_grad()
        ddp(data(rank, step)).backward()


def refused(call, *args, **kwargs):
    with pytest.raises(gl.InvalidValue) as error:
        call(*args, **kwargs)
    return str(error.value)


def a_folder(rank, folder):
    ddp, attachment = attached()
    with attachment:
        for _ in range(2):  # the second time over the first
            steps(rank, ddp, attachment, 2)
            attachment.save(folder)
            torch.distributed.barrier()
        return sorted(path.name for path in Path(folder).iterdir()), attachment.state_dict()


def test_what_is_in_a_folder(tmp_path):
    (names, state), (_, other) = run_ranks(a_folder, 2, str(tmp_path / "new" / "folder"))
    manifest = json.loads((tmp_path / "new" / "folder" / "manifest.json").read_bytes())
    assert names == sorted(["manifest.json", *(file["name"] for file in manifest["files"])])
    assert len(names) == 3
    assert [name[:19] for name in names[1:]] == ["rank-00000-of-00002", "rank-00001-of-00002"]
    assert (manifest["step"], manifest["world"], manifest["gradlane"]) == (4, 2, gl.__version__)
    assert gl.parse(manifest["strategy"]) == gl.parse(FEEDBACK)
    assert manifest["strategy"] == gl.describe(gl.parse(FEEDBACK))  # with its defaults: they may change
    assert manifest["layout"] == state["layout"]
    assert len(manifest["layout"]) > 1
    assert ["frozen", [3], "float32", False] in manifest["parameters"]
    assert not torch.equal(state["state"]["memory"]["cube"], other["state"]["memory"]["cube"])


class Narrower(nn.Module):
    """One parameter of another shape, one more, and one less than the model of these tests."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.cube = nn.Parameter(torch.full((3, 3, 24), 0.1))
        self.more = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale + self.cube.sum((0, 1)) + self.more.sum()).square().mean()


def who_may_load(rank, folder):
    ddp, attachment = attached()
    steps(rank, ddp, attachment, 3)
    attachment.save(folder)
    memory = attachment.strategy.memory.state_dict()
    attachment.close()
    messages = {}
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)

    _, other = attached("WorkerMomentum(ErrorFeedback(Sharded(Int4())))")
    with other:
        messages["strategy"] = refused(other.load, folder)
        assert other.step == 0
        other.load(folder, strict=False)
        kept = other.strategy.inner.memory.state_dict()
        assert set(kept) == set(memory)
        assert all(torch.equal(kept[name], memory[name]) for name in memory)
        assert (
            not other.strategy.memory.state_dict()
        )  # momentum is no residual, although it has the same place
        assert other.step == 3
        assert not [text for text in logged if "left out" in text]

    model, other = attached(module=Narrower())
    with other:
        messages["model"] = refused(other.load, folder)
        other.load(folder, strict=False)
        kept = other.strategy.memory.state_dict()
        assert set(kept) == {name for name in memory if name.startswith("layers")} | {"scale"}
        messages["left out"] = sorted(text for text in logged if "left out" in text)
        steps(rank, model, other, 2)  # its buckets are others, for good: it goes on with them
        assert [text for text in logged if "the run goes on with DDP's" in text]
        assert replicas_equal([p.grad for p in model.parameters()])

    _, other = attached()
    with other:
        messages["old format"] = refused(other.load, OLD_CHECKPOINT)
        messages["nothing there"] = refused(other.load, f"{folder}/nowhere")
        messages["one rank"] = refused(other.load, folder if rank == 0 else f"{folder}/elsewhere")
        with pytest.raises(gl.RanksDisagree, match="strict"):
            other.load(folder, strict=rank == 0)
    return messages


def test_who_may_load_it(tmp_path):
    for messages in run_ranks(who_may_load, 2, str(tmp_path), deadline=120):
        assert (
            f"saved by {gl.describe(gl.parse(FEEDBACK))}, this run has WorkerMomentum" in messages["strategy"]
        )
        assert "strict=False" in messages["strategy"]
        assert "it has cube [2, 3, 24] float32 trained, this model has" in messages["model"]
        assert [" ".join(text.split()[:5]) for text in messages["left out"]] == [
            "load: left out ErrorFeedback.memory: 'cube'",
            "load: left out ErrorFeedback.memory: 'spare.bias'",
            "load: left out ErrorFeedback.memory: 'spare.weight'",
        ]
        assert "has format 1, of an older gradlane" in messages["old format"]
        assert "no manifest.json in" in messages["nothing there"]
        assert "rank 1 cannot load" in messages["one rank"]


def no_space(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Odd:
    """State that no checkpoint holds."""

    def state_dict(self):
        return {"list": [1, 2]}

    def load_state_dict(self, state):
        pass


@dataclass
class WithOddState(gl.Strategy):
    odd: Odd

    async def reduce(self, bucket):
        return gl.Reduced(await gl.all_reduce(bucket.flat))


def cannot_write(rank, folder):
    messages = []
    ddp, attachment = attached()
    with attachment:
        steps(rank, ddp, attachment, 1)
        attachment.save(folder)
        steps(rank, ddp, attachment, 1)
        in_the_way = Path(folder) / "file"
        in_the_way.write_text("in the way")
        torch.distributed.barrier()

        def fails(path):
            with pytest.raises(gl.NotSaved) as error:
                attachment.save(path)
            messages.append(str(error.value))

        fails(in_the_way if rank == 1 else folder)
        with mock.patch("os.fsync", no_space if rank == 0 else os.fsync):
            fails(folder)
        attachment.strategy.memory.like(_first(attachment)).fill_(torch.inf if rank == 1 else 0.0)
        attachment.strategy.memory.keep()
        fails(folder)
        torch.distributed.barrier()
        names = sorted(path.name for path in Path(folder).iterdir())
        attachment.load(folder)
        step = attachment.step
        attachment.swap(WithOddState(Odd()))
        fails(folder)
    return messages, names, step


def _first(attachment):
    memory = attachment.strategy.memory
    layout = next(iter(memory._flats))
    return gl.Bucket(torch.zeros(sum(slot.numel for slot in layout)), layout, 0, 0, 1)


def test_a_rank_that_cannot_write_makes_all_raise(tmp_path):
    outcomes = run_ranks(cannot_write, 2, str(tmp_path), deadline=120)
    for messages, names, step in outcomes:
        assert messages[0].startswith("rank 1 could not save to")
        assert "Not a directory" in messages[0] or "File exists" in messages[0]
        assert messages[1].startswith("rank 0 could not save to")
        assert "No space left on device" in messages[1]
        assert "rank 1" in messages[2]
        assert "not finite" in messages[2]
        assert "a list in 'odd/list'" in messages[3]
        assert [name[:6] for name in names] == ["file", "manife", "rank-0", "rank-0"]
        assert step == 1


def with_own_disks(rank, folder):
    path = f"{folder}/disk-{rank}"
    ddp, attachment = attached()
    with attachment:
        for _ in range(2):
            steps(rank, ddp, attachment, 1)
            attachment.save(path)
        names = sorted(file.name[:10] for file in Path(path).iterdir())
        saved = attachment.strategy.memory.state_dict()
        steps(rank, ddp, attachment, 1)
        attachment.load(path)
        now = attachment.strategy.memory.state_dict()
        return names, attachment.step, all(torch.equal(saved[name], now[name]) for name in saved)


def one_less(rank, folder):
    _, attachment = attached()
    with attachment:
        return refused(attachment.load, f"{folder}/disk-{rank}")


def test_ranks_with_a_disk_each(tmp_path):
    for rank, found in enumerate(run_ranks(with_own_disks, 3, str(tmp_path))):
        assert found == (["manifest.j", f"rank-0000{rank}"], 2, True)
    for message in run_ranks(one_less, 2, str(tmp_path)):
        assert "if the number of ranks has changed since the save, the files of all old ranks" in message


def in_two_steps(rank, folder):
    ddp, attachment = attached()
    with attachment:
        steps(rank, ddp, attachment, 1)
        attachment.load_state_dict({**attachment.state_dict(), "step": 5 + rank})
        with pytest.raises(gl.RanksDisagree, match="the ranks differ in step: rank 0 has 5, rank 1 has 6"):
            attachment.save(folder)
    return True


class Own:
    """State of one's own that does not say what becomes of it with other ranks."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state.get("seen", 0)


@dataclass
class Counting(gl.Strategy):
    inner: gl.Strategy
    own: Own

    async def reduce(self, bucket):
        self.own.seen += 1
        return await self.inner.reduce(bucket)


def counting(rank, folder, resume):
    ddp, attachment = attached(Counting(gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))), Own()))
    with attachment:
        if not resume:
            steps(rank, ddp, attachment, 2)
            attachment.save(folder)
            return attachment.strategy.own.seen
        messages = refused(attachment.load, folder)
        attachment.load(folder, strict=False)
        return (
            messages,
            attachment.strategy.own.seen,
            len(attachment.strategy.inner.memory.state_dict()),
            attachment.step,
        )


def test_state_of_ones_own_and_another_world(tmp_path):
    assert all(run_ranks(counting, 2, str(tmp_path), False))
    for messages, seen, memories, step in run_ranks(counting, 3, str(tmp_path), True):
        assert "Counting.own (Own) does not say what becomes of it with 3 ranks instead of 2" in messages
        assert (seen, step) == (0, 2)
        assert memories in (0, 12)  # rank 2 begins without a residual
    assert run_ranks(in_two_steps, 2, str(tmp_path / "apart")) == [True, True]


def odd_models(rank, folder):
    """Complex and sparse gradients go through other buckets than DDP's first ones, and back."""
    out = []
    for name, module, strategy in (
        ("complex", ComplexWeights, FEEDBACK),
        ("sparse", SparseLookup, f"Route({{'head.*': {FEEDBACK}}})"),
    ):
        whole = None
        for resume in (False, True):
            torch.manual_seed(3)
            ddp, attachment = attached(strategy, module(), cap=0.0001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            with attachment:
                if resume:
                    ddp.module.load_state_dict(torch.load(f"{folder}/{name}.pt", weights_only=True))
                    attachment.load(f"{folder}/{name}")
                for step in range(attachment.step, 6):
                    if step == 3 and not resume:
                        attachment.save(f"{folder}/{name}")
                        if rank == 0:
                            torch.save(ddp.module.state_dict(), f"{folder}/{name}.pt")
                        torch.distributed.barrier()
                    optimizer.zero_grad()
                    ddp(data(rank, step)).backward()
                    optimizer.step()
            found = flat(ddp.parameters())
            whole = found if whole is None else whole
            out.append(torch.equal(found, whole))
    return out


def test_complex_and_sparse_gradients(tmp_path):
    assert run_ranks(odd_models, 3, str(tmp_path)) == [[True] * 4] * 3


def errors_while_regrouping(rank, folder):
    """A step that fails in other buckets than DDP's: all ranks raise, and the next ones run."""
    ddp, attachment = attached(Breaks(), timeout=20)
    with attachment:
        steps(rank, ddp, attachment, 3)
        attachment.save(folder)
    again, attachment = attached(Breaks((3, 1)))
    with attachment:
        attachment.load(folder, strict=False)
        with pytest.raises((ZeroDivisionError, gl.PeerFailed)):
            steps(rank, again, attachment, 1)
        steps(rank, again, attachment, 2)
        return replicas_equal([p.grad for p in again.parameters() if p.requires_grad]), attachment.step


@dataclass
class Breaks(gl.Strategy):
    """Raises on rank 1 in one bucket of one step."""

    place: tuple = ()

    async def reduce(self, bucket):
        mean = await gl.all_reduce(bucket.flat)
        if bucket.rank == 1 and (bucket.step, bucket.index) == self.place:
            raise ZeroDivisionError
        return gl.Reduced(mean)


def test_an_error_in_a_regrouped_step(tmp_path):
    found = run_ranks(errors_while_regrouping, 2, str(tmp_path))
    assert found == [(True, 6), (True, 6)]


def joined_ranks(rank, folder):
    """Rank 1 has less data: it shadows the others, in the saved buckets as well."""
    ddp, attachment = attached(cap=SMALL)
    with attachment:
        steps(rank, ddp, attachment, 3)
        attachment.save(folder)
    again, attachment = attached(cap=SMALL)
    with attachment:
        attachment.load(folder)
        with again.join():
            for step in range(0 if rank else 3):
                again.zero_grad()
                again(data(rank, step)).backward()
        return attachment.step


def test_joined_ranks_after_a_resume(tmp_path):
    assert run_ranks(joined_ranks, 2, str(tmp_path)) == [6, 6]


def formats(rank):
    ddp, attachment = attached()
    with attachment:
        steps(rank, ddp, attachment, 2)
        state = attachment.state_dict()
        old = {key: value for key, value in state.items() if key != "layout"} | {"format": 1}
        attachment.load_state_dict(old)
        assert attachment.step == 2
        for layout in ("abc", [["a"], ["a"]], [[1]]):
            assert "layout" in refused(attachment.load_state_dict, {**state, "layout": layout})
        shared = shared_state(attachment.strategy)
    return state["format"], shared


def test_plain_states_of_format_1_are_read():
    assert run_ranks(formats, 2) == [(2, {}), (2, {})]
