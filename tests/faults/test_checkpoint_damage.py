"""R15: all ranks refuse a damaged checkpoint, at once, and nothing has changed; nothing in it is executed."""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.checkpoint_damage import MUTATIONS, damaged
from ..support.checkpoints import SMALL
from ..support.training import build, data
from .harness import SEED

LIMIT = 1.0  # seconds to a refusal
STRATEGIES = {
    "feedback": lambda: gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))),
    "low rank": lambda: gl.ErrorFeedback(gl.PowerSGD(2, min_compression_rate=0)),
    "local steps": lambda: gl.LocalSteps(gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), every=2),
}


def opened(ddp, optimizer, strategy):
    if isinstance(strategy, gl.LocalSteps):
        return gl.local_steps(ddp, optimizer, strategy, timeout=30)
    return gl.attach(ddp, strategy, timeout=30)


def train(ddp, optimizer, rank, step):
    optimizer.zero_grad()
    ddp(data(rank, step)).backward()
    optimizer.step()


def fingerprint(state):
    """Comparable, whatever is in it."""
    if isinstance(state, dict):
        return {name: fingerprint(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def refuse_all(rank, folder, name, seeds):
    """The damages that were accepted, slow, or changed something; how often each was tried; the slowest."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=SMALL)
    folder = Path(folder)
    touched = folder / "touched"
    bad, kinds, slowest = [], Counter(), 0.0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)

    def everything():
        """Weights and momentum too, which local steps load."""
        return fingerprint(
            {
                "attachment": attachment.state_dict(),
                "weights": ddp.state_dict(),
                "momentum": optimizer.state_dict()["state"],
            }
        )

    with opened(ddp, optimizer, STRATEGIES[name]()) as attachment:
        for step in range(3):
            train(ddp, optimizer, rank, step)
        attachment.save(folder / "good")
        train(ddp, optimizer, rank, 3)
        before = everything()
        for seed in seeds:
            copy = folder / f"bad-{seed}"
            if rank == 0:
                (folder / f"kind-{seed}").write_text(damaged(folder / "good", copy, seed, touched))
            torch.distributed.barrier()
            kind = (folder / f"kind-{seed}").read_text()
            kinds[kind] += 1
            began = time.monotonic()
            try:
                attachment.load(copy)
            except gl.InvalidValue as error:
                took = time.monotonic() - began
                slowest = max(slowest, took)
                if took > LIMIT or "rank" not in str(error) or len(str(error)) > 3000:
                    bad.append((seed, kind, took, str(error)[:200]))
            else:
                bad.append((seed, kind, "accepted"))
            if everything() != before:
                bad.append((seed, kind, "changed something"))
            torch.distributed.barrier()
            if rank == 0:
                shutil.rmtree(copy)
        attachment.load(folder / "good")  # the damage was in the copies
        step = getattr(attachment, "local_steps", attachment.step)
    return bad, kinds, slowest, touched.exists(), step


def check(folder, name, seeds):
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {name}")
    for bad, kinds, slowest, touched, step in run_ranks(
        refuse_all, 2, str(folder), name, seeds, deadline=280
    ):
        print(f"{sum(kinds.values())} refused in at most {slowest:.3f} s: {dict(kinds)}")
        assert bad == []
        assert not touched
        assert step == 3
        assert set(kinds) == {mutation.__name__ for mutation in MUTATIONS}


@pytest.mark.parametrize("name", STRATEGIES)
def test_sixty_damages(name, tmp_path):
    first = 60 * list(STRATEGIES).index(name)
    check(tmp_path, name, range(first, first + 30))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_thousand_damages(name, part, tmp_path):
    first = 1000 * SEED + 500 * list(STRATEGIES).index(name) + 125 * part
    check(tmp_path, name, range(first, first + 125))


def test_the_payload_would_be_executed_by_a_reader_that_unpickles(tmp_path):
    """Or the test above would prove nothing."""
    import pickle

    from ..support.checkpoint_damage import Payload

    pickle.loads(pickle.dumps(Payload(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()
