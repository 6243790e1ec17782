"""One training with a strategy that works with the optimizer: by hand, and in each framework's own loop.

Each takes the epochs from ``first`` to ``last``. It evaluates at the end of each, then saves a checkpoint in
the way of its framework, from which a later call goes on.
"""

from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.strategies.text import parse

from .launched import Model, all_batches, batches_of, loss_of, scaler_of


def optimizer_of(model, strategy):
    """Adam where moments are frozen; with another rate for a group of its own."""
    if "Momentum" in strategy or "frozen" in strategy:
        layers = model.network[0].parameters(), model.network[2].parameters()
        return torch.optim.AdamW([{"params": layers[0], "lr": 0.005}, {"params": layers[1]}], lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Seen:
    losses: list = field(default_factory=list)
    weights: torch.Tensor | None = None  # at the end
    evaluated: list = field(default_factory=list)  # weights in each evaluation
    deployed: list = field(default_factory=list)  # weights in the model's file of each checkpoint
    betas: tuple = ()
    scale: float = 1.0
    metrics: dict = field(default_factory=dict)

    def end(self, model, optimizer, session, scaler=None):
        self.weights, self.metrics = weights_of(model), session.metrics()
        self.betas = optimizer.param_groups[0].get("betas", ())
        self.scale = scaler.get_scale() if scaler is not None else 1.0
        return self


def flat(state):
    return torch.cat([tensor.flatten() for _, tensor in sorted(state.items())])


def weights_of(model):
    """In the order in which ``flat`` has those of a file."""
    return flat({name: parameter.detach() for name, parameter in model.named_parameters()})


def by_hand(rank, world, strategy, last, *, accumulate=1):
    seen, module = Seen(), Model()
    model, optimizer = DistributedDataParallel(module), optimizer_of(module, strategy)
    chosen = parse(strategy)
    if isinstance(chosen, gl.LocalSteps):
        session = gl.local_steps(model, optimizer, chosen)
    else:
        session = gl.attach(model, chosen.first)
        gl.freeze_moments(optimizer, session, after=chosen.step, then=chosen.then.inner)
    with session:
        for _ in range(last):
            for index, batch in enumerate(batches_of(rank, world)):
                whole = (index + 1) % accumulate == 0
                before, model.require_backward_grad_sync = (
                    model.require_backward_grad_sync, model.require_backward_grad_sync and whole,
                )  # fmt: skip
                loss = loss_of(model, batch)
                seen.losses.append(loss.item())
                (loss / accumulate).backward()
                model.require_backward_grad_sync = before
                if whole:
                    optimizer.step()
                    optimizer.zero_grad()
            with session.agreed():
                seen.evaluated.append(weights_of(module))
    return seen.end(module, optimizer, session)


def lightning(rank, world, strategy, folder, first, last, *, accumulate=1, scaled=False, manual=False):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    from gradlane.integrations.lightning import GradientComm

    from .lightning_runs import Manual, Module, trainer

    seen, comm = Seen(), GradientComm(strategy)

    class Watched(Manual if manual else Module):
        def validation_step(self, batch, index):
            if index == 0 and not self.trainer.sanity_checking:
                seen.evaluated.append(weights_of(self))

        def configure_optimizers(self):
            return optimizer_of(self, strategy)

    module, scaler = Watched(), scaler_of(True) if scaled else None
    precision = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    run = trainer(
        comm, ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True), epochs=last,
        strategy="ddp" if world > 1 else "auto", devices=world, accumulate_grad_batches=accumulate,
        plugins=precision,
    )  # fmt: skip
    data = batches_of(rank, world, bad=scaled), batches_of(rank, world)
    run.fit(module, *data, ckpt_path=str(folder / f"epoch={first - 1}.ckpt") if first else None)
    seen.losses = module.losses
    for epoch in range(first, last):
        saved = torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)
        seen.deployed.append(flat(saved["state_dict"]))
    return seen.end(module, run.optimizers[0], comm.attachment, scaler)


def manual(*args, **options):
    return lightning(*args, manual=True, **options)


def fabric(rank, world, strategy, folder, first, last, *, accumulate=1, scaled=False):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from gradlane.integrations.lightning import attach_fabric

    scaler = scaler_of(True) if scaled else None
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    run = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", plugins=plugins)
    run.launch()
    seen, module = Seen(), Model()
    model, optimizer = run.setup(module, optimizer_of(module, strategy))
    state = {"model": model, "optimizer": optimizer}
    with attach_fabric(run, model, strategy, optimizer=optimizer) as attachment:
        if first:
            run.load(folder / f"{first}.ckpt", state)
            attachment.load(folder / f"{first}.gradlane")
        for epoch in range(first, last):
            for index, batch in enumerate(batches_of(rank, world, bad=scaled)):
                whole = (index + 1) % accumulate == 0
                with run.no_backward_sync(model, enabled=not whole):
                    loss = loss_of(model, batch)
                    seen.losses.append(loss.item())
                    run.backward(loss / accumulate)
                if whole:
                    optimizer.step()
                    optimizer.zero_grad()
            with attachment.agreed():
                seen.evaluated.append(weights_of(module))
                run.save(folder / f"{epoch + 1}.ckpt", state)
            attachment.save(folder / f"{epoch + 1}.gradlane")
            saved = torch.load(folder / f"{epoch + 1}.ckpt", weights_only=True)
            seen.deployed.append(flat(saved["model"]))
    return seen.end(module, optimizer.optimizer, attachment, scaler)


def accelerate(rank, world, strategy, folder, first, last, *, accumulate=1, scaled=False):
    from accelerate import Accelerator

    from gradlane.integrations.accelerate import attach_accelerate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    accelerator.scaler = scaler_of(True) if scaled else None  # there is one for fp16, on GPUs only
    seen, module = Seen(), Model()
    model, optimizer, loader = accelerator.prepare(
        module, optimizer_of(module, strategy), all_batches(world, bad=scaled)
    )
    with attach_accelerate(accelerator, model, strategy) as attachment:
        if first:
            accelerator.load_state(str(folder / str(first)))
        for epoch in range(first, last):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    seen.losses.append(loss.item())
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            with attachment.agreed():
                seen.evaluated.append(weights_of(module))
            accelerator.save_state(str(folder / str(epoch + 1)))
            accelerator.wait_for_everyone()
            seen.deployed.append(flat(load_file(folder / str(epoch + 1) / "model.safetensors")))
    return seen.end(module, optimizer.optimizer, attachment, accelerator.scaler)
