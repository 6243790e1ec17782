"""Low rank with the residual in bfloat16: half the memory for good, and the same training up to rounding."""

import pytest
import torch

import gradlane as gl
from gradlane.core.collectives import Request
from gradlane.core.running import Running, step_total
from gradlane.core.scratch import Scratch
from gradlane.kernels import native
from gradlane.simulate.answers import exchange
from gradlane.strategies.feedback import MEMORY_DTYPES

KINDS = {
    "powersgd": lambda: gl.PowerSGD(2),
    "powersgd twice": lambda: gl.PowerSGD(2, iterations=2),
    "acpsgd": lambda: gl.AcpSGD(2),
}
LAYOUT = (gl.Slot("w", torch.Size([300, 200])), gl.Slot("b", torch.Size([300])))
NUMEL = 300 * 200 + 300
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["torch", *native.levels()[-1:]], autouse=True)
def kernels(request, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, request.param)


def bytes_held(kind, dtype, *, undoable):
    """Of one rank that has gone four steps: what its strategy keeps, and the buffers of its bucket."""
    strategy, scratch = gl.ErrorFeedback(KINDS[kind](), dtype), Scratch()
    strategy.memory.undoable = undoable
    for step in range(4):
        bucket = gl.Bucket(torch.randn(NUMEL), LAYOUT, step, 0, 1, scratch=scratch)
        running, answer = Running(strategy, bucket, lambda bucket, note: None), None
        while not isinstance(state := running.resume(answer), gl.Reduced):
            if isinstance(state, Request):
                (answer,) = exchange([state], [bucket])
            else:
                answer = step_total([running])
        strategy.memory.keep()
    memory = strategy.memory
    held = [*memory._flats.values(), *memory._other.values(), *scratch._kept.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


@every_kind
@pytest.mark.parametrize("undoable", [False, True])
def test_half_the_bytes_are_held_between_steps(kind, undoable):
    wide, narrow = (bytes_held(kind, dtype, undoable=undoable) for dtype in MEMORY_DTYPES)
    copies = 2 if undoable else 1
    messages = wide - 4 * copies * NUMEL
    assert 0 <= messages < 0.1 * 4 * NUMEL
    assert narrow == 2 * copies * NUMEL + messages


@every_kind
@pytest.mark.parametrize("world", [1, 2])
def test_what_was_sent_and_the_residual_add_up(kind, world):
    """Each step may round what is left once: the errors of eight steps together are below a hundredth."""
    ranks = gl.Simulation(gl.ErrorFeedback(KINDS[kind](), torch.bfloat16), world=world)
    total, applied = torch.zeros(60, 40).double(), torch.zeros(60, 40).double()
    generator, largest = torch.Generator().manual_seed(1), 0.0
    for _ in range(8):
        mine = [{"w": torch.randn(60, 40, generator=generator)} for _ in range(world)]
        total += sum(own["w"].double() for own in mine)
        applied += world * ranks.step(mine)[0]["w"].double()
        residual = [own.memory.state_dict()["w"] for own in ranks.strategies]
        assert all(part.dtype == torch.bfloat16 for part in residual)
        largest += max(float(part.abs().max()) for part in residual)
    off = (applied + sum(part.double() for part in residual) - total).abs().max()
    assert off < 2.0**-8 * world * largest
    assert off > 0  # it is rounded after all


@every_kind
def test_training_ends_where_it_does_with_a_wide_memory(kind):
    """A problem of least squares: the loss falls as far, whatever the width of the memory."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(200, 40, generator=generator) for _ in range(2)]
    truth = torch.randn(40, 30, generator=generator)

    def loss_after(dtype):
        ranks = gl.Simulation(gl.ErrorFeedback(KINDS[kind](), dtype), world=2)
        weights = torch.zeros(40, 30)
        for _ in range(200):
            own = [{"w": x.t() @ (x @ (weights - truth)) / len(x)} for x in inputs]
            weights = weights - 0.02 * ranks.step(own)[0]["w"]
        return float(sum((x @ (weights - truth)).square().mean() for x in inputs))

    wide, narrow = loss_after(torch.float32), loss_after(torch.bfloat16)
    start = float(sum((x @ truth).square().mean() for x in inputs))
    assert wide < 0.05 * start
    assert abs(narrow - wide) < 0.1 * wide + 1e-4 * start


@every_kind
def test_a_bad_step_leaves_a_narrow_memory_sound(kind):
    ranks = gl.Simulation(gl.ErrorFeedback(KINDS[kind](), torch.bfloat16), world=2)
    generator = torch.Generator().manual_seed(4)
    for step in range(5):
        mine = [{"w": torch.randn(60, 40, generator=generator)} for _ in range(2)]
        if step == 2:
            mine[0]["w"][3, 4] = torch.nan
        answer = ranks.step(mine)[0]["w"]
        assert bool(answer.isfinite().all()) == (step != 2)
        assert all(own.memory.state_dict()["w"].isfinite().all() for own in ranks.strategies)
