"""The callback in Lightning's own Trainer, on two processes."""

import warnings
from shutil import rmtree

import pytest
import torch

lightning = pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')

import fsspec  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

import gradlane as gl  # noqa: E402
from gradlane.errors import InvalidValue, WrongState, WrongType  # noqa: E402
from gradlane.integrations.lightning import GradientComm  # noqa: E402

from ..support.checkpoints import residual_of  # noqa: E402
from .launched import (  # noqa: E402
    FILES,
    HALF,
    MEMORY,
    STEPS,
    assert_carried,
    batches_of,
    equal,
    files_in,
    ranks,
    reference,
    scaler_of,
    weights_of,
)
from .lightning_runs import Module, trainer  # noqa: E402


def results(module, comm):
    return module.losses, weights_of(module.network), comm.attachment.metrics()["comm/bytes_wire"]


def fitted(rank, options, ddp_options):
    module, comm = Module(), GradientComm(MEMORY)
    ddp = DDPStrategy(process_group_backend="gloo", **ddp_options)
    trainer(comm, strategy=ddp, **options).fit(module, batches_of(rank), batches_of(rank))
    with pytest.raises(WrongState, match="closed"):
        comm.attachment.swap("Mean()")
    return results(module, comm)


@pytest.mark.parametrize(
    ("options", "ddp_options", "plainly"),
    [
        ({"val_check_interval": 3}, {}, {}),
        ({}, {"gradient_as_bucket_view": True, "static_graph": True}, {}),
        ({"accumulate_grad_batches": 2}, {"gradient_as_bucket_view": True}, {"accumulate": 2}),
        ({"precision": "bf16-mixed"}, {}, {"autocast": torch.bfloat16}),
        ({"plugins": [MixedPrecision("16-mixed", "cpu", scaler_of(True))]}, {}, HALF),
    ],
    ids=["validation in between", "bucket views, static graph", "accumulation", "bf16-mixed", "16-mixed"],
)
def test_it_is_plain_ddp_with_the_same_strategy(options, ddp_options, plainly):
    found = ranks(fitted, options, ddp_options)
    assert found[0][2] > 0
    assert equal(found, reference(**plainly))


def interrupted(rank, folder, checkpoint):
    """Two epochs, the second in a new trainer; everything but the checkpoint is forgotten in between."""
    losses = []
    for epochs, path in ((1, None), (2, str(folder / checkpoint))):
        module, comm = Module(), GradientComm(MEMORY)
        run = trainer(comm, ModelCheckpoint(folder, "{epoch}", save_top_k=1, save_last="link"), epochs=epochs)
        run.fit(module, batches_of(rank), ckpt_path=path)
        run.save_checkpoint(folder / f"after-{epochs}.ckpt")
        losses += module.losses
    return losses, weights_of(module.network)


@pytest.mark.parametrize("checkpoint", ["after-1.ckpt", "last.ckpt"], ids=["saved after fit", "a link"])
def test_a_resumed_run_is_the_run_that_never_stopped(checkpoint, tmp_path):
    resumed = ranks(interrupted, tmp_path, checkpoint)
    for (losses, weights), (wanted, wanted_weights, _) in zip(resumed, reference(epochs=2), strict=True):
        assert losses == wanted
        assert torch.equal(weights, wanted_weights)
    kept = sorted(path.name for path in tmp_path.glob("*.ckpt") if not path.is_symlink())
    assert kept == ["after-1.ckpt", "after-2.ckpt", "epoch=1.ckpt"]
    assert sorted(path.name for path in tmp_path.glob("*.gradlane")) == [f"{name}.gradlane" for name in kept]
    assert [files_in(folder) for folder in tmp_path.glob("*.gradlane")] == [FILES] * 3


def saved(rank, folder):
    comm = GradientComm(MEMORY)
    run = trainer(comm)
    run.fit(Module(), batches_of(rank))
    run.save_checkpoint(folder / "a.ckpt")
    return residual_of(comm.attachment.strategy)


def resumed_by_three(rank, folder):
    module, comm = Module(), GradientComm(MEMORY)
    found = []
    module.on_train_batch_start = lambda *_: found.append(
        (comm.attachment.step, residual_of(comm.attachment.strategy))
    )
    run = trainer(comm, epochs=2, devices=3)
    run.fit(module, batches_of(rank % 2), ckpt_path=str(folder / "a.ckpt"))
    return *found[0], comm.attachment.step, weights_of(module.network)


def test_a_run_may_go_on_with_another_number_of_ranks(tmp_path):
    before = ranks(saved, tmp_path)
    after = ranks(resumed_by_three, tmp_path, world=3)
    assert [step for step, *_ in after] == [STEPS] * 3
    assert [step for *_, step, _ in after] == [2 * STEPS] * 3
    assert_carried(before, [memory for _, memory, *_ in after])
    assert all(torch.equal(weights, after[0][-1]) for *_, weights in after)


def fitted_twice(rank):
    module, comm = Module(), GradientComm("After(10, ErrorFeedback(Gathered(TopK(0.2))))")
    module.configure_optimizers = lambda: torch.optim.SGD(
        module.parameters(), lr=0.05
    )  # Lightning makes it anew
    run = trainer(comm)
    run.fit(module, batches_of(rank))
    run.validate(module, batches_of(rank), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, batches_of(rank))
    other = Module()
    trainer(comm).fit(other, batches_of(rank))
    return module.losses, weights_of(module), comm.attachment.step, other.losses


def fitted_once(rank):
    module, comm = Module(), GradientComm("After(10, ErrorFeedback(Gathered(TopK(0.2))))")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)
    trainer(comm, epochs=2).fit(module, batches_of(rank))
    return module.losses, weights_of(module)


def test_a_second_fit_goes_on_and_another_module_begins_anew():
    for twice, once in zip(ranks(fitted_twice), ranks(fitted_once), strict=True):
        losses, weights, step, of_another = twice
        assert losses == once[0]
        assert torch.equal(weights, once[1])
        assert step == STEPS
        assert of_another[0] == losses[0]


def spent(rank):
    """Two fits of one module, one of another; in between a swap to another mechanism."""
    private = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.0)
    comm, module = GradientComm(private), Module()
    run = trainer(comm)
    run.fit(module, batches_of(rank))
    found = [comm.attachment.strategy.spent.runs()]
    run.fit_loop.max_epochs = 2
    module.on_train_start = lambda: comm.attachment.swap("Private(Mean(), clip=1.0, noise_multiplier=2.0)")
    run.fit(module, batches_of(rank))
    found += [comm.attachment.strategy.spent.runs()]
    other = Module()
    trainer(comm).fit(other, batches_of(rank))
    assert comm.attachment.strategy is private
    return [*found, private.spent.runs()]


def test_what_is_spent_stays_spent_when_it_trains_again():
    for found in ranks(spent):
        assert found == [
            {(1.0, 1.0): STEPS},
            {(1.0, 1.0): STEPS, (2.0, 1.0): STEPS},
            {(1.0, 1.0): 2 * STEPS, (2.0, 1.0): STEPS},
        ]


def logged(rank, folder):
    loggers = [CSVLogger(folder, "csv", version=0), TensorBoardLogger(folder, "tensorboard", version=0)]
    comm = GradientComm("Cast(Mean(), bfloat16)", log_every=4, nonfinite="raise", verify_every=100)
    trainer(comm, logger=loggers, log_every_n_steps=1).fit(Module(), batches_of(rank))
    assert (comm.attachment.settings.nonfinite, comm.attachment.settings.verify_every) == ("raise", 100)


def test_metrics_arrive_in_the_loggers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(logged, tmp_path)
    header, *rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    lines = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    lines = [line for line in lines if line["comm/ratio"]]
    assert [(line["step"], float(line["comm/ratio"])) for line in lines] == [("3", 2.0), ("7", 2.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "version_0"))
    events.Reload()
    sent = events.Scalars("comm/bytes_wire")
    assert [event.step for event in sent] == [3, 7]
    assert sent[1].value == 2 * sent[0].value == 8 * events.Scalars("comm/step/bytes_wire")[0].value


def remote(rank, folder):
    """Checkpoints go to a file system that is no folder; fsspec has one in memory."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saver = ModelCheckpoint("memory://run", "{epoch}", save_on_train_epoch_end=True)
        trainer(GradientComm(MEMORY), saver).fit(Module(), batches_of(rank))
    found = [str(warning.message) for warning in told if "memory://run" in str(warning.message)]
    memory = fsspec.filesystem("memory")
    if rank == 0:
        (folder / "a.ckpt").write_bytes(memory.cat("/run/epoch=0.ckpt"))
    torch.distributed.barrier()
    memory.pipe("/run/epoch=0.ckpt", (folder / "a.ckpt").read_bytes())  # all ranks see it, as they would s3
    again = {"ckpt_path": "memory://run/epoch=0.ckpt"}
    with pytest.raises(InvalidValue) as caught:
        trainer(GradientComm(MEMORY), epochs=2).fit(Module(), batches_of(rank), **again)
    comm = GradientComm(MEMORY, resume=False)
    trainer(comm, epochs=2).fit(Module(), batches_of(rank), **again)
    return found, str(caught.value), comm.attachment.step


def test_checkpoints_elsewhere_are_without_the_memory_and_a_warning_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for (warning,), refusal, step in ranks(remote, tmp_path):
        assert "checkpoints go to memory://run" in warning
        assert "GradientComm(..., resume=False)" in warning
        assert "memory://run/epoch=0.ckpt is not in a file system" in refusal
        assert "GradientComm(..., resume=False)" in refusal
        assert step == STEPS
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def refused(rank, folder):
    def message(error, *callbacks, path=None, **options):
        with pytest.raises(error) as caught:
            trainer(*callbacks, **options).fit(Module(), batches_of(rank), ckpt_path=path)
        return str(caught.value)

    found = [message(WrongState, GradientComm("Mean()"), strategy=DDPStrategy(ddp_comm_hook=len))]
    found += [message(RuntimeError, GradientComm("Mean()"), GradientComm("Noop()"))]
    run = trainer(GradientComm(MEMORY))
    run.fit(Module(), batches_of(rank))
    run.save_checkpoint(folder / "a.ckpt")
    run.fit_loop.max_epochs = 2
    run.fit(run.lightning_module, batches_of(rank))
    run.save_checkpoint(folder / "b.ckpt")
    path = str(folder / "a.ckpt")
    found += [message(InvalidValue, GradientComm("Mean()"), epochs=2, path=path)]
    torch.distributed.barrier()
    if rank == 0:
        rmtree(folder / "a.ckpt.gradlane")
    torch.distributed.barrier()
    found += [message(InvalidValue, GradientComm(MEMORY), epochs=2, path=path)]
    if rank == 0:
        (folder / "b.ckpt.gradlane").rename(folder / "a.ckpt.gradlane")
    torch.distributed.barrier()
    found += [message(InvalidValue, GradientComm(MEMORY), epochs=2, path=path)]
    trainer(GradientComm("Mean()", resume=False), epochs=2).fit(Module(), batches_of(rank), ckpt_path=path)
    return found


def test_what_cannot_work_is_refused_with_a_way_out(tmp_path):
    hook, second, other_strategy, no_folder, other_step = ranks(refused, tmp_path)[0]
    assert "ddp_comm_hook" in hook
    assert "leave it out" in hook
    assert "GradientComm" in second  # Lightning's own words
    assert "saved by ErrorFeedback(Gathered(TopK(ratio=0.2" in other_strategy
    assert "this run has Mean()" in other_strategy
    assert "no manifest.json" in no_folder
    assert str(tmp_path / "a.ckpt.gradlane") in no_folder
    assert "GradientComm(..., resume=False)" in no_folder
    assert "is of step 16, the checkpoint of step 8" in other_step


def test_a_trainer_without_ddp_is_refused():
    run = trainer(GradientComm("Mean()"), strategy="ddp", devices=1)
    run.strategy.__class__ = type("Sharded", (type(run.strategy).__mro__[1],), {})  # FSDP needs a GPU
    with pytest.raises(WrongType, match=r'Sharded; use Trainer\(strategy="ddp"\)'):
        GradientComm("Mean()").setup(run, Module(), "fit")
