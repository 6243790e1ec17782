"""Models of FSDP2 that Accelerate has prepared, on two ranks and two times two."""

import logging

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason='needs pip install -e ".[accelerate]"')

from accelerate import Accelerator, ParallelismConfig  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402

from gradlane.errors import InvalidValue, WrongState, WrongType  # noqa: E402
from gradlane.integrations.accelerate import attach_accelerate, log_metrics  # noqa: E402
from gradlane.session.sharded import ShardedAttachment  # noqa: E402

from .accelerate_on_cpus import let_cpus_shard  # noqa: E402
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
from .launched import (  # noqa: E402
    BAD,
    STEPS,
    Model,
    all_batches,
    equal,
    files_in,
    loss_of,
    optimizer_of,
    ranks,
)


def accelerator_for(shape, *, state_dict="SHARDED_STATE_DICT", **options):
    if len(shape) == 2:
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=shape[0], dp_shard_size=shape[1])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        state_dict_type=state_dict,
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def prepared(shape, *, bad=False, **options):
    accelerator = accelerator_for(shape, **options)
    model = Model()
    return accelerator, *accelerator.prepare(
        model, optimizer_of(model), all_batches(world_of(shape), bad=bad)
    )


def epoch(accelerator, model, optimizer, loader, clip=False):
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(rank, shape, text, options, bad=False, clip=False):
    let_cpus_shard()
    prepared_here = accelerator, model, *_ = prepared(shape, bad=bad, **options)
    assert accelerator.is_fsdp2
    attachment = attach_accelerate(accelerator, model, text) if text else None
    found = results(epoch(*prepared_here, clip), model, attachment)
    return found if attachment is None else (*found, attachment.metrics())


ACCUMULATED = {"gradient_accumulation_steps": 2}
COMPILED = {"dynamo_backend": "eager"}


@pytest.mark.parametrize(
    ("options", "clip"),
    [({}, False), (ACCUMULATED, True), ({"mixed_precision": "bf16"}, False), (COMPILED, False)],
    ids=["", "accumulated", "bf16", "compiled"],
)
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_the_mean_is_accelerate_without_gradlane(shape, options, clip):
    world = world_of(shape)
    found = ranks(trained, shape, "Mean()", options, False, clip, world=world)
    assert found[0][2] > 0
    assert same_training(found, ranks(trained, shape, None, options, False, clip, world=world))


@pytest.mark.parametrize(
    ("options", "clip", "plainly"), [({}, False, {}), (ACCUMULATED, True, {"accumulate": 2, "clip": True})]
)
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_it_is_plain_fsdp_with_the_same_strategy(shape, options, clip, plainly):
    found = ranks(trained, shape, LOSSY[shape], options, False, clip, world=world_of(shape))
    assert equal(found, reference(shape, LOSSY[shape], **plainly))
    assert not same_training(found, reference(shape, "Mean()", **plainly))


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_batch_that_is_not_finite_is_skipped_by_all(shape):
    found = ranks(trained, shape, LOSSY[shape], {}, True, world=world_of(shape))
    for (losses, weights, _, metrics), wanted in zip(
        found, reference(shape, LOSSY[shape], without=BAD), strict=True
    ):
        assert (metrics["comm/skipped"], metrics["comm/steps"]) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])


def interrupted(rank, shape, folder, state_dict):
    """Two epochs, the second after ``load_state`` into models, optimizers and attachments made anew."""
    let_cpus_shard()
    losses = []
    for part in range(2):
        prepared_here = accelerator, model, *_ = prepared(shape, state_dict=state_dict)
        with attach_accelerate(accelerator, model, LOSSY[shape]) as attachment:
            if part:
                accelerator.load_state(str(folder / "0"))
                assert attachment.step == STEPS
            losses += epoch(*prepared_here)
        accelerator.save_state(str(folder / str(part)))
        accelerator.wait_for_everyone()
    return results(losses, model, attachment)


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_resumed_run_is_the_run_that_never_stopped(shape, state_dict, tmp_path):
    found = ranks(interrupted, shape, tmp_path, state_dict, world=world_of(shape))
    assert same_training(found, reference(shape, LOSSY[shape], epochs=2))
    for part in range(2):
        assert len(files_in(tmp_path / str(part) / "gradlane")) == 1 + world_of(shape)


def logged(rank, folder):
    let_cpus_shard()
    prepared_here = accelerator, model, optimizer, loader = prepared(
        TWO, log_with="tensorboard", project_dir=str(folder)
    )
    accelerator.init_trackers("run")
    attachment = attach_accelerate(accelerator, model, "Cast(Mean(), bfloat16)", verify_every=100)
    for batch in loader:
        epoch(accelerator, model, optimizer, [batch])
        log_metrics(accelerator, attachment, every=4)
    attachment.close()
    prepared_here[0].end_training()


def test_metrics_arrive_in_the_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(logged, tmp_path, world=world_of(TWO))
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("comm/step/ratio")] == [(4, 2.0), (8, 2.0)]


def sharded_by_hand(rank, shape, text):
    """As on the page, for CPUs: Accelerate does not shard, and leaves a model alone that is sharded."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(shard(Model(), shape), evaluation_mode=True)
    optimizer, loader = accelerator.prepare(optimizer_of(model), all_batches(world_of(shape)))
    attachment = attach_accelerate(accelerator, model, text)
    assert isinstance(attachment, ShardedAttachment)
    return results(epoch(accelerator, model, optimizer, loader), model, attachment)


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_model_that_was_sharded_by_hand(shape):
    found = ranks(sharded_by_hand, shape, LOSSY[shape], world=world_of(shape))
    assert equal(found, reference(shape, LOSSY[shape]))


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def on_cpus(rank):
    """Without help Accelerate makes a DDP model of it, and says nothing."""
    messages = Messages()
    logging.getLogger("gradlane").addHandler(messages)
    accelerator, model, *_ = prepared(ONE)
    attach_accelerate(accelerator, model, "Mean()").close()
    return type(model).__name__, messages.found


def test_a_plugin_that_accelerate_ignores_is_named():
    for name, messages in ranks(on_cpus):
        assert name == "DistributedDataParallel"
        assert any("has made a DDP model here" in message for message in messages)


def refused(rank):
    let_cpus_shard()

    def message(error, *args):
        with pytest.raises(error) as caught:
            attach_accelerate(*args)
        return str(caught.value)

    accelerator, model, *_ = prepared(ONE)
    found = [message(InvalidValue, accelerator, model, text) for text in WITH_OPTIMIZER]
    attachment = attach_accelerate(accelerator, model, "Mean()")
    found += [message(WrongState, accelerator, model, "Mean()")]
    attachment.close()
    found += [message(WrongState, accelerator, shard(Model(), ONE), "Mean()")]
    return found


def test_what_cannot_work_is_refused_with_a_way_out():
    for local, momentum, twice, unprepared in ranks(refused):
        assert "LocalSteps" in local
        assert "After" in momentum
        assert all(
            "with FSDP each rank has a part of the model; use DDP" in text for text in (local, momentum)
        )
        assert "swap" in twice
        assert "is not what prepare returned" in unprepared


def of_fsdp1(rank):
    """Accelerate itself cannot wrap a model of FSDP1 on CPUs, but takes one that is wrapped."""
    let_cpus_shard()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    model = accelerator.prepare(model)
    with pytest.raises(WrongType) as caught:
        attach_accelerate(accelerator, model, "Mean()")
    return str(caught.value)


def test_fsdp1_is_refused_with_the_way_to_fsdp2():
    for found in ranks(of_fsdp1):
        assert "FSDP1" in found
        assert "FullyShardedDataParallelPlugin(fsdp_version=2)" in found
