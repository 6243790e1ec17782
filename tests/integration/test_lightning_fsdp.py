"""Modules of FSDP2 in Lightning's Trainer: ``ModelParallelStrategy``, two ranks and two times two."""

import pytest
import torch

lightning = pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402

from gradlane.errors import InvalidValue, WrongType  # noqa: E402
from gradlane.integrations.lightning import GradientComm  # noqa: E402

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
    shards_of,
    world_of,
)
from .launched import BAD, STEPS, batches_of, equal, files_in, network, ranks  # noqa: E402
from .lightning_runs import Manual, Module, trainer  # noqa: E402


def of(kind, shape):
    """A module that shards its network in ``configure_model``, once."""

    class Sharded(kind):
        def configure_model(self):
            if not hasattr(self, "mesh"):
                self.mesh = shape
                shard(self.network, shape)

    return Sharded()


def sharded_trainer(shape, *callbacks, distributed=True, **options):
    world = world_of(shape)
    strategy = ModelParallelStrategy(world, 1, save_distributed_checkpoint=distributed)
    return trainer(*callbacks, strategy=strategy, devices=world, **options)


def fitted(rank, shape, text, options, kind=Module, bad=False):
    module, comm = of(kind, shape), GradientComm(text) if text else None
    run = sharded_trainer(shape, *([comm] if comm else []), **options)
    run.fit(module, batches_of(rank, world_of(shape), bad=bad))
    found = results(module.losses, module.network, comm.attachment if comm else None)
    return found if comm is None else (*found, comm.attachment.metrics())


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP}
"""Lightning reduces the gradient of each micro-batch, and adds the means."""


@pytest.mark.parametrize(
    "options", [{}, ACCUMULATED, {"precision": "bf16-true"}], ids=["", "accumulated", "bf16"]
)
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_the_mean_is_lightning_without_gradlane(shape, options):
    world = world_of(shape)
    found = ranks(fitted, shape, "Mean()", options, world=world)
    assert found[0][2] > 0
    assert same_training(found, ranks(fitted, shape, None, options, world=world))


@pytest.mark.parametrize(
    ("options", "plainly"), [({}, {}), (ACCUMULATED, {"accumulate": 2, "added": True, "clip": True})]
)
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_it_is_plain_fsdp_with_the_same_strategy(shape, options, plainly):
    found = ranks(fitted, shape, LOSSY[shape], options, world=world_of(shape))
    assert equal(found, reference(shape, LOSSY[shape], **plainly))
    assert not same_training(found, reference(shape, "Mean()", **plainly))


@pytest.mark.parametrize("kind", [Module, Manual])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_batch_that_is_not_finite_is_skipped_by_all(shape, kind):
    found = ranks(fitted, shape, LOSSY[shape], {}, kind, True, world=world_of(shape))
    for (losses, weights, _, metrics), wanted in zip(
        found, reference(shape, LOSSY[shape], without=BAD), strict=True
    ):
        assert (metrics["comm/skipped"], metrics["comm/steps"]) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])


def test_micro_batches_after_one_that_is_not_finite_are_skipped_with_it():
    """Their means are finite, but would be added to a sum that is not. So no step is left."""
    options = {"accumulate_grad_batches": STEPS}
    untrained = ranks(lambda rank: shards_of(shard(network(), ONE)))
    for (_, weights, _, metrics), before in zip(
        ranks(fitted, ONE, "Mean()", options, Module, True), untrained, strict=True
    ):
        assert metrics["comm/skipped"] == STEPS - BAD
        assert torch.equal(weights, before)


def interrupted(rank, shape, folder, distributed):
    """Two epochs, the second in a new trainer; everything but the checkpoint is forgotten in between."""
    losses = []
    for epochs, path in ((1, None), (2, str(folder / "after-1.ckpt"))):
        module, comm = of(Module, shape), GradientComm(LOSSY[shape])
        saver = ModelCheckpoint(folder, "{epoch}", save_top_k=1)
        run = sharded_trainer(shape, comm, saver, distributed=distributed, epochs=epochs)
        run.fit(module, batches_of(rank, world_of(shape)), ckpt_path=path)
        run.save_checkpoint(folder / f"after-{epochs}.ckpt")
        losses += module.losses
    return results(losses, module.network, comm.attachment)


@pytest.mark.parametrize("distributed", [True, False], ids=["a folder", "one file"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_resumed_run_is_the_run_that_never_stopped(shape, distributed, tmp_path):
    found = ranks(interrupted, shape, tmp_path, distributed, world=world_of(shape))
    assert same_training(found, reference(shape, LOSSY[shape], epochs=2))
    kept = ["after-1.ckpt", "after-2.ckpt", "epoch=1.ckpt"]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == kept
    assert all((tmp_path / name).is_dir() == distributed for name in kept)
    assert sorted(path.name for path in tmp_path.glob("*.gradlane")) == [f"{name}.gradlane" for name in kept]
    assert len(files_in(tmp_path / "after-1.ckpt.gradlane")) == 1 + world_of(shape)


def fitted_twice(rank, shape, times):
    """One epoch after the other, in one fit or in one each. Lightning makes the optimizer anew."""
    module, comm = of(Module, shape), GradientComm(LOSSY[shape])
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)
    run = sharded_trainer(shape, comm, epochs=2 // times)
    for number in range(times):
        run.fit_loop.max_epochs = 2 if times == 1 else number + 1
        run.fit(module, batches_of(rank, world_of(shape)), batches_of(rank, world_of(shape)))
    assert comm.attachment.step == 2 * STEPS
    return results(module.losses, module.network, comm.attachment)


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_second_fit_goes_on(shape):
    once, twice = (ranks(fitted_twice, shape, times, world=world_of(shape)) for times in (1, 2))
    assert same_training(once, twice)


def logged(rank, folder):
    comm = GradientComm("Cast(Mean(), bfloat16)", log_every=4)
    logger = CSVLogger(folder, "csv", version=0)
    sharded_trainer(TWO, comm, logger=logger, log_every_n_steps=1).fit(
        of(Module, TWO), batches_of(rank, world_of(TWO))
    )


def test_metrics_arrive_in_the_logger(tmp_path):
    ranks(logged, tmp_path, world=world_of(TWO))
    header, *rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    lines = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    lines = [line for line in lines if line["comm/step/ratio"]]
    assert [(line["step"], float(line["comm/step/ratio"])) for line in lines] == [("3", 2.0), ("7", 2.0)]


def refused(rank):
    found = []
    for text in (*WITH_OPTIMIZER, "ErrorFeedback(Sharded(Int8()))"):
        with pytest.raises(InvalidValue) as caught:
            sharded_trainer(ONE, GradientComm(text)).fit(of(Module, ONE), batches_of(rank))
        found.append(str(caught.value))
    return found


def test_what_needs_full_copies_is_refused():
    for local, momentum, feedback in ranks(refused):
        assert "LocalSteps" in local
        assert "After" in momentum
        assert all(
            "with FSDP each rank has a part of the model; use DDP" in text for text in (local, momentum)
        )
        assert "or give the model replicas" in feedback


def test_fsdp1_is_refused_with_the_way_to_fsdp2():
    run = trainer(strategy="ddp", devices=1)
    run._accelerator_connector.strategy = FSDPStrategy()  # Lightning makes no Trainer with it without a GPU
    with pytest.raises(WrongType, match=r"FSDP1.*Trainer\(strategy=ModelParallelStrategy\(\.\.\.\)\)"):
        GradientComm("Mean()").setup(run, Module(), "fit")
