"""Models that Fabric has set up, on two processes."""

import pytest
import torch

lightning = pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.loggers import CSVLogger  # noqa: E402
from lightning.fabric.plugins import MixedPrecision  # noqa: E402

from gradlane.errors import WrongState, WrongType  # noqa: E402
from gradlane.integrations.lightning import attach_fabric  # noqa: E402

from .launched import (  # noqa: E402
    FILES,
    HALF,
    MEMORY,
    STEPS,
    Model,
    batches_of,
    equal,
    files_in,
    loss_of,
    optimizer_of,
    ranks,
    reference,
    scaler_of,
    weights_of,
)


def launched(**options):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", **options)
    fabric.launch()
    return fabric


def with_fabric(rank, plugins):
    fabric = launched(plugins=plugins)
    model = Model()
    with pytest.raises(WrongType, match=r"fabric\.setup"):
        attach_fabric(fabric, model, MEMORY)
    model, optimizer = fabric.setup(model, optimizer_of(model))
    attachment = attach_fabric(fabric, model, MEMORY)
    with pytest.raises(WrongState, match="swap"):
        attach_fabric(fabric, model, MEMORY)
    losses = []
    for index, batch in enumerate(batches_of(rank)):
        whole = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not whole):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            fabric.backward(loss / 2)
        if whole:
            optimizer.step()
            optimizer.zero_grad()
    attachment.close()
    return losses, weights_of(model), attachment.metrics()["comm/bytes_wire"]


@pytest.mark.parametrize(
    ("plugins", "plainly"),
    [([], {}), ([MixedPrecision("16-mixed", "cpu", scaler_of(True))], HALF)],
    ids=["fp32", "16-mixed"],
)
def test_fabric_is_plain_ddp_with_the_same_strategy(plugins, plainly):
    assert equal(ranks(with_fabric, plugins), reference(accumulate=2, **plainly))


def interrupted(rank, folder):
    """Two epochs, the second with everything made anew and loaded as the page says."""
    losses = []
    for epoch in range(2):
        fabric = launched()
        model = Model()
        model, optimizer = fabric.setup(model, optimizer_of(model))
        state = {"model": model, "optimizer": optimizer}
        with attach_fabric(fabric, model, MEMORY) as attachment:
            if epoch:
                fabric.load(folder / "a.ckpt", state)
                attachment.load(folder / "a.gradlane")
                assert attachment.step == STEPS
            for batch in batches_of(rank):
                loss = loss_of(model, batch)
                losses.append(loss.item())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            fabric.save(folder / "a.ckpt", state)
            attachment.save(folder / "a.gradlane")
        fabric.barrier()
    return losses, weights_of(model)


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    for (losses, weights), wanted in zip(ranks(interrupted, tmp_path), reference(epochs=2), strict=True):
        assert losses == wanted[0]
        assert torch.equal(weights, wanted[1])
    assert files_in(tmp_path / "a.gradlane") == FILES


def logged(rank, folder):
    fabric = launched(loggers=[CSVLogger(folder, "csv", version=0)])
    model = Model()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    with attach_fabric(fabric, model, "Cast(Mean(), bfloat16)", nonfinite="raise") as attachment:
        assert attachment.settings.nonfinite == "raise"
        for step, batch in enumerate(batches_of(rank)):
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            if step % 4 == 3:
                fabric.log_dict(attachment.metrics(), step=step)
    if rank == 0:
        fabric.logger.finalize("success")


def test_metrics_arrive_in_the_logger(tmp_path):
    ranks(logged, tmp_path)
    header, *rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    lines = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert [(line["step"], float(line["comm/ratio"])) for line in lines] == [("3", 2.0), ("7", 2.0)]
    assert float(lines[1]["comm/bytes_wire"]) == 2 * float(lines[0]["comm/bytes_wire"]) > 0
