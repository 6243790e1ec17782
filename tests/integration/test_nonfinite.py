"""One rank has a batch that is not finite: the run is, in every framework, that in which it never was."""

import importlib.util

import pytest
import torch

from .launched import (
    BAD,
    MEMORY,
    STEPS,
    Model,
    all_batches,
    batches_of,
    loss_of,
    optimizer_of,
    ranks,
    reference,
    weights_of,
)


def lightning(rank, world, manual):
    from gradlane.integrations.lightning import GradientComm

    from .lightning_runs import Manual, Module, trainer

    module, comm = Manual() if manual else Module(), GradientComm(MEMORY)
    trainer(comm, devices=world).fit(module, batches_of(rank, world, bad=True))
    return module.losses, weights_of(module.network), comm.attachment


def automatic(rank, world):
    return lightning(rank, world, False)


def manual(rank, world):
    return lightning(rank, world, True)


def fabric(rank, world, closure=False):
    from lightning.fabric import Fabric

    from gradlane.integrations.lightning import attach_fabric

    run = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    run.launch()
    model = Model()
    model, optimizer = run.setup(model, optimizer_of(model))
    losses = []
    with attach_fabric(run, model, MEMORY) as attachment:
        for batch in batches_of(rank, world, bad=True):

            def evaluate(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                losses.append(loss.item())
                run.backward(loss)

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
    return losses, weights_of(model), attachment


def fabric_with_a_closure(rank, world):
    return fabric(rank, world, closure=True)


def accelerate(rank, world):
    from accelerate import Accelerator

    from gradlane.integrations.accelerate import attach_accelerate

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), all_batches(world, bad=True))
    losses = []
    with attach_accelerate(accelerator, model, MEMORY) as attachment:
        for batch in loader:
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights_of(model), attachment


RUNS = {
    "automatic": ("lightning", automatic),
    "manual": ("lightning", manual),
    "fabric": ("lightning", fabric),
    "fabric, closure": ("lightning", fabric_with_a_closure),
    "accelerate": ("accelerate", accelerate),
}


def told(rank, run, world):
    losses, weights, attachment = run(rank, world)
    metrics = attachment.metrics()
    return losses, weights, metrics["comm/skipped"], metrics["comm/steps"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_that_is_not_finite_leaves_no_trace(name, world):
    framework, run = RUNS[name]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    found = ranks(told, run, world, world=world)
    for (losses, weights, skipped, steps), wanted in zip(
        found, reference(world=world, without=BAD), strict=True
    ):
        assert (skipped, steps) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])
        assert torch.equal(weights, found[0][1])
        assert weights.isfinite().all()
    assert [loss == loss for loss in (found[0][0][BAD], found[-1][0][BAD])] == [True, False]
