"""``python train.py``: one process, no DDP, no process group. The script works as it stands."""

import importlib.util
import logging

import pytest
import torch

from ..support.checkpoints import residual_of
from .launched import (
    BAD,
    MEMORY,
    STEPS,
    Model,
    all_batches,
    alone,
    assert_carried,
    batches_of,
    files_in,
    loss_of,
    optimizer_of,
    ranks,
    reference,
    weights_of,
)

# ``resume`` is how many epochs have been before.


class Result:
    """Of one run: what plain DDP of one rank is asked for too, and what there is to see besides."""

    def __init__(self, losses, module, attachment):
        self.plainly = losses, weights_of(module), attachment.metrics()["comm/bytes_wire"]
        self.metrics = attachment.metrics()
        self.step = attachment.step
        self.residual = residual_of(attachment.strategy)


def lightning(rank, world, folder, *, accumulate=1, bad=False, resume=0, strategy=MEMORY, manual=False):
    from gradlane.integrations.lightning import GradientComm

    from .lightning_runs import Manual, Module, trainer

    module, comm = Manual() if manual else Module(), GradientComm(strategy)
    found = []
    module.on_train_start = lambda: found.append(
        (comm.attachment.step, residual_of(comm.attachment.strategy))
    )
    how = "auto" if world == 1 else "ddp"
    run = trainer(comm, strategy=how, devices=world, epochs=1 + resume, accumulate_grad_batches=accumulate)
    path = str(folder / "a.ckpt")
    run.fit(module, batches_of(rank, world, bad=bad), ckpt_path=path if resume else None)
    run.save_checkpoint(path)
    return found[0], Result(module.losses, module.network, comm.attachment)


def manual(*args, **options):
    return lightning(*args, manual=True, **options)


def fabric(rank, world, folder, *, accumulate=1, bad=False, resume=0, strategy=MEMORY):
    from lightning.fabric import Fabric

    from gradlane.integrations.lightning import attach_fabric

    run = Fabric(accelerator="cpu", devices=world, strategy="auto" if world == 1 else "ddp")
    run.launch()
    model = Model()
    model, optimizer = run.setup(model, optimizer_of(model))
    state = {"model": model, "optimizer": optimizer}
    losses = []
    with attach_fabric(run, model, strategy) as attachment:
        if resume:
            run.load(folder / "a.ckpt", state)
            attachment.load(folder / "a.gradlane")
        found = attachment.step, residual_of(attachment.strategy)
        for index, batch in enumerate(batches_of(rank, world, bad=bad)):
            whole = (index + 1) % accumulate == 0
            with run.no_backward_sync(model, enabled=not whole):
                loss = loss_of(model, batch)
                losses.append(loss.item())
                run.backward(loss / accumulate)
            if whole:
                optimizer.step()
                optimizer.zero_grad()
        run.save(folder / "a.ckpt", state)
        attachment.save(folder / "a.gradlane")
    return found, Result(losses, model, attachment)


def accelerate(rank, world, folder, *, accumulate=1, bad=False, resume=0, strategy=MEMORY):
    from accelerate import Accelerator

    from gradlane.integrations.accelerate import attach_accelerate, log_metrics

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = Model()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), all_batches(world, bad=bad))
    losses = []
    with attach_accelerate(accelerator, model, strategy) as attachment:
        if resume:
            accelerator.load_state(str(folder / "a"))
        found = attachment.step, residual_of(attachment.strategy)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            log_metrics(accelerator, attachment)
        accelerator.save_state(str(folder / "a"))
        accelerator.wait_for_everyone()
    return found, Result(losses, accelerator.unwrap_model(model), attachment)


RUNS = {
    "lightning": ("lightning", lightning),
    "fabric": ("lightning", fabric),
    "accelerate": ("accelerate", accelerate),
}


@pytest.fixture(params=RUNS)
def run(request):
    framework, function = RUNS[request.param]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    return function


def of_one(run, folder, **options):
    """In a process of its own, which has no process group, neither before nor after."""

    def function():
        heard = []
        logging.getLogger("gradlane").addFilter(lambda record: heard.append(record.getMessage()) or True)
        answer = run(0, 1, folder, **options)
        assert not torch.distributed.is_initialized()
        return *answer, heard

    return alone(function)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_ddp_of_one_rank_with_the_same_strategy(run, accumulate, tmp_path):
    _, result, heard = of_one(run, tmp_path, accumulate=accumulate)
    ((losses, weights, _),) = reference(world=1, accumulate=accumulate)
    assert result.plainly[0] == losses
    assert torch.equal(result.plainly[1], weights)
    assert result.plainly[2] == 0
    assert (result.metrics["comm/steps"], result.metrics["comm/ratio"]) == (STEPS // accumulate, 1.0)
    assert [line for line in heard if "one process: nothing is sent" in line]
    if accumulate == 1:
        (folder,) = [path.parent for path in tmp_path.rglob("manifest.json")]
        assert files_in(folder) == ["manifest.json", "rank-00000-of-00001"]


def test_a_batch_that_is_not_finite_is_skipped(run, tmp_path):
    _, result, _ = of_one(run, tmp_path, bad=True)
    ((losses, weights, _),) = reference(world=1, without=BAD)
    assert result.plainly[0][:BAD] + result.plainly[0][BAD + 1 :] == losses
    assert torch.equal(result.plainly[1], weights)
    assert result.metrics["comm/skipped"] == 1


def test_optimizing_by_hand(tmp_path):
    pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')
    _, result, _ = of_one(manual, tmp_path, bad=True)
    assert torch.equal(result.plainly[1], reference(world=1, without=BAD)[0][1])


@pytest.mark.parametrize("many", [2, 3])
def test_a_run_goes_on_with_one_process_and_with_many(run, many, tmp_path):
    def with_many(rank, resume):
        (step, residual), result = run(rank, many, tmp_path, resume=resume)
        return step, residual, result.residual

    before = ranks(with_many, 0, world=many)
    (step, residual), result, _ = of_one(run, tmp_path, resume=1)
    assert (step, result.step) == (STEPS, 2 * STEPS)
    assert_carried([last for *_, last in before], [residual])
    after = ranks(with_many, 2, world=many)
    assert [step for step, *_ in after] == [2 * STEPS] * many
    assert_carried([result.residual], [residual for _, residual, *_ in after])
