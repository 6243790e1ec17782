"""Models of FSDP2 that Fabric has set up, on two ranks and two times two."""

from functools import partial

import pytest
import torch

lightning = pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402

from gradlane.errors import InvalidValue, WrongType  # noqa: E402
from gradlane.integrations.lightning import attach_fabric  # noqa: E402

from .fsdp_runs import (  # noqa: E402
    CLIP,
    LOSSY,
    ONE,
    TWO,
    WITH_OPTIMIZER,
    reference,
    results,
    same_training,
    shard,
    world_of,
)
from .launched import BAD, STEPS, Model, batches_of, equal, loss_of, optimizer_of, ranks  # noqa: E402


def set_up(shape, *, distributed=True):
    """Fabric wants the optimizer of a sharded model to be made after the model is set up."""
    strategy = ModelParallelStrategy(
        partial(_shard, shape), world_of(shape), 1, save_distributed_checkpoint=distributed
    )
    fabric = Fabric(accelerator="cpu", devices=world_of(shape), strategy=strategy)
    fabric.launch()
    model = fabric.setup(Model())
    return fabric, model, fabric.setup_optimizers(optimizer_of(model))


def _shard(shape, model, mesh):
    return shard(model, shape)


def epoch(fabric, model, optimizer, batches, accumulate=1):
    losses = []
    for index, batch in enumerate(batches):
        last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            fabric.backward(loss / accumulate)
        if last:
            if accumulate > 1:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(rank, shape, text, accumulate, bad=False):
    fabric, model, optimizer = set_up(shape)
    attachment = attach_fabric(fabric, model, text) if text else None
    losses = epoch(fabric, model, optimizer, batches_of(rank, world_of(shape), bad=bad), accumulate)
    found = results(losses, model, attachment)
    return found if attachment is None else (*found, attachment.metrics())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_fabric_is_plain_fsdp_with_the_same_strategy(shape, accumulate):
    plainly = {"accumulate": accumulate, "clip": accumulate > 1}
    world = world_of(shape)
    lossy = ranks(trained, shape, LOSSY[shape], accumulate, world=world)
    assert equal(lossy, reference(shape, LOSSY[shape], **plainly))
    mean = ranks(trained, shape, "Mean()", accumulate, world=world)
    assert mean[0][2] > lossy[0][2]
    assert same_training(mean, ranks(trained, shape, None, accumulate, world=world))


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_batch_that_is_not_finite_is_skipped_by_all(shape):
    found = ranks(trained, shape, LOSSY[shape], 1, True, world=world_of(shape))
    for (losses, weights, _, metrics), wanted in zip(
        found, reference(shape, LOSSY[shape], without=BAD), strict=True
    ):
        assert (metrics["comm/skipped"], metrics["comm/steps"]) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])


def interrupted(rank, shape, folder, distributed):
    """Two epochs, the second with everything made anew and loaded as the page says."""
    losses = []
    for part in range(2):
        fabric, model, optimizer = set_up(shape, distributed=distributed)
        state = {"model": model, "optimizer": optimizer}
        with attach_fabric(fabric, model, LOSSY[shape]) as attachment:
            if part:
                fabric.load(folder / "a.ckpt", state)
                attachment.load(folder / "a.gradlane")
                assert attachment.step == STEPS
            losses += epoch(fabric, model, optimizer, batches_of(rank, world_of(shape)))
            fabric.save(folder / "a.ckpt", state)
            attachment.save(folder / "a.gradlane")
        fabric.barrier()
    return results(losses, model, attachment)


@pytest.mark.parametrize("distributed", [True, False], ids=["a folder", "one file"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_resumed_run_is_the_run_that_never_stopped(shape, distributed, tmp_path):
    found = ranks(interrupted, shape, tmp_path, distributed, world=world_of(shape))
    assert same_training(found, reference(shape, LOSSY[shape], epochs=2))


def refused(rank):
    fabric, model, optimizer = set_up(ONE)
    found = []
    for text in WITH_OPTIMIZER:
        for given in (None, optimizer):
            with pytest.raises(InvalidValue) as caught:
                attach_fabric(fabric, model, text, optimizer=given)
            found.append(str(caught.value))
    attach_fabric(fabric, model, "Mean()").close()
    return found


def test_what_needs_full_copies_is_refused():
    for found in ranks(refused):
        assert all("with FSDP each rank has a part of the model; use DDP" in text for text in found)


def of_fsdp1(rank):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(Model())
    fabric._strategy = FSDPStrategy()  # Fabric makes none with it without a GPU
    with pytest.raises(WrongType) as caught:
        attach_fabric(fabric, model, "Mean()")
    return str(caught.value)


def test_fsdp1_is_refused_with_the_way_to_fsdp2():
    (found,) = ranks(of_fsdp1, world=1)
    assert "FSDP1" in found
    assert "Fabric(strategy=ModelParallelStrategy(...))" in found
