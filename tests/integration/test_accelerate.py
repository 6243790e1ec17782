"""Models that Accelerate has prepared, on two processes."""

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason='needs pip install -e ".[accelerate]"')

from accelerate import Accelerator, DistributedDataParallelKwargs  # noqa: E402
from accelerate.utils import DDPCommunicationHookType, ProjectConfiguration  # noqa: E402

from gradlane.errors import InvalidValue, WrongState, WrongType  # noqa: E402
from gradlane.integrations.accelerate import attach_accelerate, log_metrics  # noqa: E402

from ..support.checkpoints import residual_of  # noqa: E402
from .launched import (  # noqa: E402
    FILES,
    MEMORY,
    STEPS,
    Model,
    all_batches,
    assert_carried,
    equal,
    files_in,
    loss_of,
    optimizer_of,
    ranks,
    reference,
    scaler_of,
    weights_of,
)


def prepared(scaled=False, **options):
    accelerator = Accelerator(cpu=True, **options)
    if scaled:
        accelerator.scaler = scaler_of(True)  # Accelerate makes one for fp16, which it has on GPUs only
    model = Model()
    return accelerator, *accelerator.prepare(model, optimizer_of(model), all_batches())


def epoch(accelerator, model, optimizer, loader):
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(rank, accumulate, precision, scaled):
    prepared_here = prepared(scaled, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    accelerator, model, *_ = prepared_here
    attachment = attach_accelerate(accelerator, model, MEMORY)
    losses = epoch(*prepared_here)
    attachment.close()
    accelerator.end_training()
    return losses, weights_of(model), attachment.metrics()["comm/bytes_wire"]


@pytest.mark.parametrize(
    ("accumulate", "precision", "plainly"),
    [
        (1, "no", {}),
        (2, "no", {"accumulate": 2}),
        (1, "bf16", {"autocast": torch.bfloat16}),
        (1, "no", {"scaled": True}),
    ],
    ids=["fp32", "accumulation", "bf16", "a scaled loss"],
)
def test_it_is_plain_ddp_with_the_same_strategy(accumulate, precision, plainly):
    found = ranks(trained, accumulate, precision, plainly.get("scaled", False))
    assert found[0][2] > 0
    assert equal(found, reference(**plainly))


def interrupted(rank, folder):
    """Two epochs, the second after ``load_state`` into models, optimizers and attachments made anew."""
    losses = []
    for part in range(2):
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, iteration=part)
        prepared_here = prepared(project_config=project)
        accelerator, model, *_ = prepared_here
        attachment = attach_accelerate(accelerator, model, MEMORY)
        if part:
            accelerator.load_state()
            assert attachment.step == STEPS
        losses += epoch(*prepared_here)
        attachment.close()
        accelerator.save_state()  # closed or not: what is known is saved
    return losses, weights_of(model)


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    for (losses, weights), wanted in zip(ranks(interrupted, tmp_path), reference(epochs=2), strict=True):
        assert losses == wanted[0]
        assert torch.equal(weights, wanted[1])
    for checkpoint in ("checkpoint_0", "checkpoint_1"):
        assert files_in(tmp_path / "checkpoints" / checkpoint / "gradlane") == FILES


def saved(rank, folder):
    prepared_here = accelerator, model, *_ = prepared()
    attachment = attach_accelerate(accelerator, model, MEMORY)
    epoch(*prepared_here)
    accelerator.save_state(str(folder))
    attachment.close()
    return residual_of(attachment.strategy)


def resumed_by_three(rank, folder):
    prepared_here = accelerator, model, *_ = prepared()
    attachment = attach_accelerate(accelerator, model, MEMORY)
    accelerator.load_state(str(folder))
    found = attachment.step, residual_of(attachment.strategy)
    epoch(*prepared_here)
    attachment.close()
    return *found, weights_of(model)


def test_a_run_may_go_on_with_another_number_of_ranks(tmp_path):
    before = ranks(saved, tmp_path)
    after = ranks(resumed_by_three, tmp_path, world=3)
    assert [step for step, *_ in after] == [STEPS] * 3
    assert_carried(before, [residual for _, residual, _ in after])
    assert all(torch.equal(weights, after[0][-1]) for *_, weights in after)


def logged(rank, folder):
    prepared_here = prepared(log_with="tensorboard", project_dir=str(folder), gradient_accumulation_steps=2)
    accelerator, model, optimizer, loader = prepared_here
    accelerator.init_trackers("run")
    attachment = attach_accelerate(
        accelerator, model, "Cast(Mean(), bfloat16)", nonfinite="raise", verify_every=100
    )
    assert (attachment.settings.nonfinite, attachment.settings.verify_every) == ("raise", 100)
    for batch in loader:
        epoch(accelerator, model, optimizer, [batch])
        log_metrics(accelerator, attachment, every=2)
    attachment.close()
    accelerator.end_training()


def test_metrics_arrive_in_the_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(logged, tmp_path)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("comm/ratio")] == [(2, 2.0), (4, 2.0)]
    sent = [event.value for event in events.Scalars("comm/bytes_wire")]
    assert sent[1] == 2 * sent[0] > 0


def refused(rank, folder):
    def message(error, *args):
        with pytest.raises(error) as caught:
            attach_accelerate(*args)
        return str(caught.value)

    accelerator, model, *_ = prepared()
    found = [message(WrongState, accelerator, unprepared, "Mean()") for unprepared in (Model(), model.module)]
    found += [message(WrongType, model, accelerator, "Mean()")]
    accelerator.save_state(str(folder / "without"))
    accelerator.wait_for_everyone()
    attachment = attach_accelerate(accelerator, model, "Mean()")
    found += [message(WrongState, accelerator, model, "Noop()")]
    with pytest.raises(InvalidValue) as caught:
        accelerator.load_state(str(folder / "without"))
    found += [str(caught.value)]
    attachment.close()
    attachment = attach_accelerate(accelerator, model, MEMORY)  # its files are written, not the closed one's
    accelerator.save_state(str(folder / "with"))
    accelerator.wait_for_everyone()  # save_state does not
    accelerator.load_state(str(folder / "with"))
    attachment.close()
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator, model, *_ = prepared(kwargs_handlers=[hook])
    return [*found, message(WrongState, accelerator, model, "Mean()")]


def test_what_cannot_work_is_refused_with_a_way_out(tmp_path):
    unprepared, inside, swapped, twice, no_folder, hook = ranks(refused, tmp_path)[0]
    assert "model = accelerator.prepare(model) first" in unprepared
    assert inside == unprepared
    assert "attach_accelerate(accelerator, model, strategy)" in swapped
    assert "swap" in twice
    assert "no manifest.json" in no_folder
    assert str(tmp_path / "without" / "gradlane") in no_folder
    assert "call accelerator.load_state before attach_accelerate" in no_folder
    assert "fp16_compress_hook" in hook
