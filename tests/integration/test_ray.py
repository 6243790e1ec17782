"""A real local Ray with two workers, which Ray restarts once; with one, and with three."""

import logging
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason='needs pip install -e ".[ray]"')
pytest.importorskip("ray.train", reason='needs pip install -e ".[ray]"')

import ray
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn.parallel import DistributedDataParallel

from gradlane.errors import InvalidValue, WrongState, WrongType
from gradlane.integrations.ray import attach_ray, report

from . import optimizer_runs as runs
from .launched import (
    BAD,
    FILES,
    MEMORY,
    STEPS,
    Model,
    batches_of,
    files_in,
    loss_of,
    optimizer_of,
    ranks,
    reference,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of many things that are no concern of ours


WORLDS = (1, 2, 3)
WITH_OPTIMIZER = (
    "LocalSteps(Nesterov(ErrorFeedback(Sharded(Int4()))), every=3)",
    "After(5, SharedMomentum(ErrorFeedback(Sharded(Sign()))), Sharded(Int8()))",
)


@cache
def by_hand(strategy):
    return ranks(runs.by_hand, 2, strategy, 2)


@pytest.fixture(scope="module")
def local_ray():
    reference(epochs=2)  # forks, which it must do before Ray has threads here
    for world in WORLDS:
        reference(world=world, without=BAD)
    for strategy in WITH_OPTIMIZER:
        by_hand(strategy)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def fit(loop, folder, name, workers=2, **config):
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": folder, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    )
    return trainer.fit()


def two_epochs(config):
    """The first life ends in the middle of the second epoch, on rank 1."""
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(Model())
    optimizer = optimizer_of(model)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            model.module.load_state_dict(torch.load(f"{folder}/model.pt"))
            optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))

    def save(folder):
        torch.save(model.module.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    losses = []
    with attach_ray(model, MEMORY, verify_every=STEPS, nonfinite="raise") as attachment:
        began = attachment.step
        for epoch in range(began // STEPS, 2):
            for index, batch in enumerate(batches_of(rank)):
                if (began, epoch, index, rank) == (0, 1, 3, 1):
                    raise OSError("this worker is lost")
                loss = loss_of(model, batch)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            report(attachment, {"epoch": epoch}, save=save)
        sent = attachment.metrics()["comm/bytes_wire"]
    torch.save((began, losses, weights_of(model.module), sent), config["folder"] / f"rank{rank}.pt")


def test_a_run_that_ray_restarts_is_the_run_that_never_stopped(local_ray, tmp_path):
    result = fit(two_epochs, tmp_path, "restarted")
    for rank, (wanted_losses, wanted, bytes_of_both) in enumerate(reference(epochs=2)):
        began, losses, weights, sent = torch.load(tmp_path / f"rank{rank}.pt")
        assert began == STEPS
        assert losses == wanted_losses[STEPS:]
        assert torch.equal(weights, wanted)
        assert 0 < bytes_of_both < 2 * sent < 1.01 * bytes_of_both  # a hash of the weights was sent too
    with result.checkpoint.as_directory() as folder:
        assert files_in(Path(folder) / "gradlane") == FILES
    assert result.metrics["epoch"] == 1
    assert result.metrics["comm/bytes_wire"] > 0
    assert result.metrics["comm/steps"] == STEPS  # of this life


def with_optimizer(config):
    """As ``two_epochs``, with a strategy that works with the optimizer."""
    rank, strategy = ray.train.get_context().get_world_rank(), config["strategy"]
    module = Model()
    model = ray.train.torch.prepare_model(module)
    optimizer = runs.optimizer_of(module, strategy)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            weights, state, first = torch.load(f"{folder}/model.pt")
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    seen = runs.Seen()
    with attach_ray(model, strategy, optimizer=optimizer) as attachment:
        for epoch in range(first, 2):
            for index, batch in enumerate(batches_of(rank)):
                if (first, epoch, index, rank) == (0, 1, 3, 1):
                    raise OSError("this worker is lost")
                loss = loss_of(model, batch)
                seen.losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            def save(folder, epoch=epoch):
                seen.deployed.append(runs.weights_of(module))
                torch.save((module.state_dict(), optimizer.state_dict(), epoch + 1), folder / "model.pt")

            report(attachment, {}, save=save)
            with attachment.agreed():
                seen.evaluated.append(runs.weights_of(module))
    torch.save(vars(seen.end(module, optimizer, attachment)), config["folder"] / f"rank{rank}.pt")


@pytest.mark.parametrize("strategy", WITH_OPTIMIZER)
def test_local_steps_and_1_bit_adam_are_the_loop_by_hand(strategy, local_ray, tmp_path):
    fit(with_optimizer, tmp_path, "restarted", strategy=strategy)
    for rank, wanted in enumerate(by_hand(strategy)):
        seen = runs.Seen(**torch.load(tmp_path / f"rank{rank}.pt"))
        assert seen.losses == wanted.losses[STEPS:]
        assert torch.equal(seen.weights, wanted.weights)
        assert torch.equal(seen.evaluated[0], wanted.evaluated[1])
        assert all(map(torch.equal, seen.deployed, seen.evaluated))
        assert seen.betas == wanted.betas


def unlucky(config):
    """The last rank has a batch that is not finite. One worker has no DDP."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(Model())
    assert isinstance(model, DistributedDataParallel) == (world > 1)
    optimizer = optimizer_of(model)
    losses = []
    with attach_ray(model, MEMORY) as attachment:
        for batch in batches_of(rank, world, bad=True):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report(attachment, {}, save=lambda folder: torch.save(losses, folder / "losses.pt"))
        metrics = attachment.metrics()
    weights = weights_of(getattr(model, "module", model))
    torch.save((losses, weights, metrics), config["folder"] / f"unlucky{rank}.pt")


@pytest.mark.parametrize("world", WORLDS)
def test_a_batch_that_is_not_finite_leaves_no_trace(world, local_ray, tmp_path):
    result = fit(unlucky, tmp_path, "unlucky", workers=world)
    for rank, (wanted_losses, wanted, _) in enumerate(reference(world=world, without=BAD)):
        losses, weights, metrics = torch.load(tmp_path / f"unlucky{rank}.pt")
        assert losses[:BAD] + losses[BAD + 1 :] == wanted_losses
        assert torch.equal(weights, wanted)
        assert weights.isfinite().all()
        assert (metrics["comm/skipped"], metrics["comm/steps"]) == (1, STEPS)
        assert (metrics["comm/bytes_wire"] > 0) == (world > 1)
    with result.checkpoint.as_directory() as folder:
        assert len(files_in(Path(folder) / "gradlane")) == world + 1


def refused(config):
    rank = ray.train.get_context().get_world_rank()
    found = []

    def message(error, *args):
        with pytest.raises(error) as caught:
            attach_ray(*args)
        found.append(str(caught.value))

    message(WrongType, Model(), MEMORY)
    model = ray.train.torch.prepare_model(Model())
    assert isinstance(model, DistributedDataParallel)
    message(InvalidValue, model, WITH_OPTIMIZER[0])
    attachment = attach_ray(model, MEMORY, resume=False)
    message(WrongState, model, MEMORY)
    attachment.close()
    if ray.train.get_checkpoint() is None:
        report(attachment, {"life": 1})  # without save: no checkpoint
        with_nothing_in_it = config["folder"] / "empty"
        with_nothing_in_it.mkdir(exist_ok=True)
        (with_nothing_in_it / "model.pt").touch()
        ray.train.report({"life": 1}, checkpoint=ray.train.Checkpoint.from_directory(with_nothing_in_it))
        raise OSError("restart me")
    message(InvalidValue, model, MEMORY)
    torch.save(found, config["folder"] / f"refused{rank}.pt")


def test_what_cannot_work_is_refused_with_a_way_out(local_ray, tmp_path):
    fit(refused, tmp_path, "refused")
    for rank in range(2):
        unprepared, no_optimizer, twice, no_folder = torch.load(tmp_path / f"refused{rank}.pt")
        assert "model = ray.train.torch.prepare_model(model) first" in unprepared
        assert "write attach_ray(model, strategy, optimizer=optimizer)" in no_optimizer
        assert "swap" in twice
        assert "no manifest.json" in no_folder
        assert "attach_ray(..., resume=False)" in no_folder


def test_outside_of_a_worker_it_is_refused():
    with pytest.raises(WrongState, match="train loop of a TorchTrainer"):
        attach_ray(Model(), MEMORY)
