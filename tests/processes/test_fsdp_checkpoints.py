"""What a strategy remembers of an FSDP2 model, in torch's distributed checkpoint."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradlane as gl
from gradlane.local import run_ranks

from ..support.fsdp import batch, residual_sums, sharded, shards

INT4 = "ErrorFeedback(Sharded(Int4()))"
POWERSGD = "ErrorFeedback(PowerSGD(1, min_compression_rate=1))"
NESTEROV = "Nesterov(ErrorFeedback(Gathered(TopK(0.2))), 0.5, 0.5)"


def start(shape, text, *, copies=False, seed=0):
    model = sharded(shape, copies=copies, seed=seed)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), gl.attach(model, text, timeout=20)


def steps(rank, model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        model(batch(rank, step)).backward()
        optimizer.step()


def whole_run(rank, shape, text, copies):
    model, optimizer, attachment = start(shape, text, copies=copies)
    steps(rank, model, optimizer, range(7))
    attachment.close()
    return shards(model)


def in_two(rank, shape, text, copies, folder):
    model, optimizer, attachment = start(shape, text, copies=copies)
    steps(rank, model, optimizer, range(4))
    states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": states[0], "optim": states[1], "gradlane": attachment.distributed_state()},
        checkpoint_id=folder,
    )
    attachment.close()
    model, optimizer, attachment = start(shape, text, copies=copies, seed=5)
    states = get_state_dict(model, optimizer)
    loaded = {"model": states[0], "optim": states[1]}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    attachment.load_distributed(folder)
    assert attachment.step == 4
    steps(rank, model, optimizer, range(4, 7))
    attachment.close()
    return shards(model)


@pytest.mark.parametrize(
    ("shape", "copies", "text"),
    [
        ((2, 2), False, INT4),
        ((2,), True, POWERSGD),
        pytest.param((2, 2), False, POWERSGD, marks=pytest.mark.slow),
        pytest.param((2, 2), False, NESTEROV, marks=pytest.mark.slow),
        pytest.param((2,), True, INT4, marks=pytest.mark.slow),
        pytest.param((2,), True, NESTEROV, marks=pytest.mark.slow),
    ],
)
def test_a_resume_is_bit_identical(shape, copies, text, tmp_path):
    ranks = 4 if len(shape) == 2 else 2
    whole = run_ranks(whole_run, ranks, shape, text, copies)
    parts = run_ranks(in_two, ranks, shape, text, copies, str(tmp_path))
    for one, two in zip(whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def saved(rank, shape, text, folder):
    model, optimizer, attachment = start(shape, text)
    steps(rank, model, optimizer, range(3))
    dcp.save({"gradlane": attachment.distributed_state()}, checkpoint_id=folder)
    state = attachment.strategy.cross.memory.state_dict()
    attachment.close()
    return state


def moved(rank, shape, text, folder):
    _, _, attachment = start(shape, text)
    attachment.load_distributed(folder)
    state = attachment.strategy.cross.memory.state_dict()
    attachment.close()
    return attachment.step, state


OTHER_MESHES = [((2, 2), (2, 1)), ((2, 2), (1, 2)), ((2, 1), (2, 2)), ((1, 4), (1, 2)), ((2, 2), (3, 1))]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*each, marks=pytest.mark.slow if n > 1 else ()) for n, each in enumerate(OTHER_MESHES)],
)
def test_another_mesh_keeps_the_sum_of_residuals(before, after, tmp_path):
    old = residual_sums(run_ranks(saved, before[0] * before[1], before, INT4, str(tmp_path)))
    everyone = run_ranks(moved, after[0] * after[1], after, INT4, str(tmp_path))
    assert {step for step, _ in everyone} == {3}
    new = residual_sums([state for _, state in everyone])
    assert old.keys() == new.keys()
    assert any(value.abs().sum() > 0 for value in old.values())
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, rtol=1e-6, atol=1e-9)


def refused(rank, folder):
    model, optimizer, attachment = start((2, 2), INT4)
    steps(rank, model, optimizer, range(2))
    dcp.save({"other": attachment.distributed_state()}, checkpoint_id=folder)
    before = attachment.strategy.state_dict()
    messages = []
    for key, path in (("gradlane", folder), ("other", folder + "/none")):
        with pytest.raises(gl.InvalidValue) as caught:
            attachment.load_distributed(path, key=key)
        messages.append(str(caught.value))
    attachment.swap("ErrorFeedback(Gathered(TopK(0.5)))")
    with pytest.raises(gl.InvalidValue) as caught:
        attachment.load_distributed(folder, key="other")
    messages.append(str(caught.value))
    attachment.close()
    assert before["cross"]
    one_dimension = gl.attach(sharded((4,)), "Mean()", timeout=20)
    with pytest.raises(gl.InvalidValue) as caught:
        one_dimension.distributed_state()
    messages.append(str(caught.value))
    dist.barrier()
    return messages


def test_what_cannot_be_loaded_is_refused_by_all(tmp_path):
    for nothing, missing, other, one_dimension in run_ranks(refused, 4, str(tmp_path)):
        assert "nothing of gradlane under 'gradlane'" in nothing
        assert "cannot read" in missing
        assert "it was saved by AcrossReplicas(ErrorFeedback(Sharded" in other
        assert "use attachment.save(folder)" in one_dimension
