"""The Trainer of transformers with a tiny GPT-2 made from nothing, on two processes."""

import logging
from functools import cache
from shutil import rmtree

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs pip install -e ".[transformers]"')
pytest.importorskip("accelerate", reason='needs pip install -e ".[transformers]"')

from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import gradlane as gl  # noqa: E402
from gradlane.errors import InvalidValue, WrongState, WrongType  # noqa: E402
from gradlane.integrations.transformers import attach_trainer  # noqa: E402
from gradlane.strategies.accountant import epsilon_of  # noqa: E402

from ..support.checkpoints import residual_of  # noqa: E402
from .launched import (  # noqa: E402
    BAD,
    BATCH,
    FILES,
    MEMORY,
    RATE,
    STEPS,
    WORLD,
    alone,
    assert_carried,
    equal,
    files_in,
    ranks,
    scaler_of,
    weights_of,
)


def tiny():
    torch.manual_seed(0)
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, **options)
    )


def texts(world=WORLD):
    rows = torch.randint(0, 32, (world * BATCH * STEPS, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    """Samples in their order, and the mean over a micro-batch as its loss: what a plain loop does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False
        self.losses = []
        self.unlucky = False  # the loss of step BAD is not finite here

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **options):
        loss = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            if self.unlucky and len(self.losses) == BAD:
                loss = loss * torch.nan
            self.losses.append(loss.item())
        return loss


def trainer(folder, *, epochs=1, accumulate=1, evaluates=False, callbacks=None, world=WORLD, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=epochs, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate, max_grad_norm=0, ddp_find_unused_parameters=False,
        disable_tqdm=True, **{"save_strategy": "no", "report_to": "none", "logging_steps": 2, **options},
    )  # fmt: skip
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return InOrder(model=model, args=arguments, train_dataset=texts(world), optimizers=(optimizer, steady),
                   eval_dataset=texts() if evaluates else None, callbacks=callbacks)  # fmt: skip


def plain(rank, epochs=1, accumulate=1, scaled=False, world=WORLD, without=None):
    scaler = scaler_of(scaled)
    model = DistributedDataParallel(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    with gl.attach(model, MEMORY, scaler=scaler) as attachment:
        for _ in range(epochs):
            for step in range(STEPS):
                if step == without:
                    continue
                first = BATCH * (world * step + rank)
                rows = torch.stack([text["input_ids"] for text in texts(world)[first : first + BATCH]])
                model.require_backward_grad_sync = (step + 1) % accumulate == 0
                loss = model(input_ids=rows, labels=rows).loss
                losses.append(loss.item())
                scaler.scale(loss / accumulate).backward()
                if model.require_backward_grad_sync:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        return losses, weights_of(model.module), attachment.metrics()["comm/bytes_wire"]


@cache
def reference(**options):
    return ranks(lambda rank: plain(rank, **options), world=options.get("world", WORLD))


def trained(rank, folder, accumulate, scaled):
    run = trainer(folder, accumulate=accumulate)
    if scaled:
        run.accelerator.scaler = scaler_of(True)  # there is one for fp16, on GPUs only
    comm = attach_trainer(run, MEMORY)
    run.train()
    with pytest.raises(WrongState, match="closed"):
        comm.attachment.swap("Mean()")
    return run.losses, weights_of(run.model), comm.attachment.metrics()["comm/bytes_wire"]


@pytest.mark.parametrize(
    ("accumulate", "scaled"),
    [(1, False), (2, False), (1, True)],
    ids=["fp32", "accumulation", "a scaled loss"],
)
def test_it_is_plain_ddp_with_the_same_strategy(accumulate, scaled, tmp_path):
    found = ranks(trained, tmp_path, accumulate, scaled)
    assert found[0][2] > 0
    assert equal(found, reference(accumulate=accumulate, scaled=scaled))


def unlucky(rank, folder, world):
    run = trainer(folder, world=world)
    run.unlucky = rank == world - 1
    comm = attach_trainer(run, MEMORY)
    run.train()
    metrics = comm.attachment.metrics()
    return run.losses, weights_of(run.model), metrics["comm/skipped"], metrics["comm/steps"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_that_is_not_finite_leaves_no_trace(world, tmp_path):
    found = ranks(unlucky, tmp_path, world, world=world)
    for (losses, weights, skipped, steps), wanted in zip(
        found, reference(world=world, without=BAD), strict=True
    ):
        assert (skipped, steps) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])
        assert torch.equal(weights, found[0][1])
        assert weights.isfinite().all()
    assert torch.tensor(found[-1][0]).isnan().sum() == 1


def spent(rank, folder):
    """Two trainings, then one that goes on from the middle of the second."""
    private = gl.Private(gl.Cast(gl.Mean(), torch.bfloat16), clip=1.0, noise_multiplier=1.0)
    run = trainer(folder, save_strategy="steps", save_steps=STEPS // 2)
    attach_trainer(run, private)
    found = []
    for where in (None, None, str(folder / f"checkpoint-{STEPS // 2}")):
        run.train(resume_from_checkpoint=where)
        found.append((private.spent.steps, private.epsilon(1e-5)))
    return found


def test_what_is_spent_stays_spent_when_it_trains_again(tmp_path):
    for found in ranks(spent, tmp_path):
        steps = [STEPS, 2 * STEPS, 2 * STEPS + STEPS // 2]
        assert [count for count, _ in found] == steps
        assert [epsilon for _, epsilon in found] == [epsilon_of(1.0, 1.0, count, 1e-5) for count in steps]


def interrupted(rank, folder, where):
    whole = trainer(folder, epochs=2, save_strategy="steps", save_steps=6, save_total_limit=2)
    attach_trainer(whole, MEMORY)
    whole.train()
    kept = {path.name: files_in(path / "gradlane") for path in folder.iterdir()}
    torch.distributed.barrier()
    if rank == 0:
        rmtree(folder / "checkpoint-16")  # of the end
    torch.distributed.barrier()
    resumed = trainer(folder, epochs=2)
    attach_trainer(resumed, MEMORY)
    resumed.train(resume_from_checkpoint=where if where is True else str(folder / where))
    return whole.losses, resumed.losses, weights_of(whole.model), weights_of(resumed.model), kept


@pytest.mark.parametrize("where", ["checkpoint-12", True], ids=["by name", "the last one"])
def test_a_resumed_run_is_the_run_that_never_stopped(where, tmp_path):
    for losses, resumed_losses, weights, resumed_weights, kept in ranks(interrupted, tmp_path, where):
        assert len(losses) == 2 * STEPS
        assert resumed_losses == losses[12:]
        assert torch.equal(resumed_weights, weights)
        assert kept == {"checkpoint-12": FILES, "checkpoint-16": FILES}


def saved(rank, folder):
    run = trainer(folder, save_strategy="epoch")
    comm = attach_trainer(run, MEMORY)
    run.train()
    return residual_of(comm.attachment.strategy)


class Look(TrainerCallback):
    """What is there when the first step begins."""

    def on_step_begin(self, args, state, control, **kwargs):
        if not hasattr(self, "found"):
            self.found = self.comm.attachment.step, residual_of(self.comm.attachment.strategy)


def resumed_by_three(rank, folder):
    look = Look()
    run = trainer(folder, epochs=2, callbacks=[look])
    look.comm = attach_trainer(run, MEMORY)
    run.train(resume_from_checkpoint=True)
    return *look.found, weights_of(run.model)


def test_a_run_may_go_on_with_another_number_of_ranks(tmp_path):
    before = ranks(saved, tmp_path)
    after = ranks(resumed_by_three, tmp_path, world=3)
    assert [step for step, *_ in after] == [STEPS] * 3
    assert_carried(before, [residual for _, residual, _ in after])
    assert all(torch.equal(weights, after[0][-1]) for *_, weights in after)


def of_one(folder, accumulate, unlucky):
    run = trainer(folder, accumulate=accumulate, world=1, save_strategy="epoch")
    run.unlucky = unlucky
    comm = attach_trainer(run, MEMORY)
    run.train()
    assert not torch.distributed.is_initialized()
    metrics = comm.attachment.metrics()
    assert (metrics["comm/skipped"], metrics["comm/steps"]) == (unlucky, STEPS // accumulate)
    assert [line["comm/bytes_wire"] for line in run.state.log_history if "loss" in line] == [0.0] * (
        STEPS // accumulate // 2
    )
    return run.losses, weights_of(run.model), residual_of(comm.attachment.strategy)


@pytest.mark.parametrize(
    ("accumulate", "unlucky"), [(1, False), (2, False), (1, True)], ids=["", "accumulation", "not finite"]
)
def test_one_process_is_ddp_of_one_rank(accumulate, unlucky, tmp_path):
    losses, weights, _ = alone(of_one, tmp_path, accumulate, unlucky)
    ((wanted, wanted_weights, _),) = reference(
        accumulate=accumulate, world=1, without=BAD if unlucky else None
    )
    assert losses[:BAD] == wanted[:BAD]
    assert losses[BAD + unlucky :] == wanted[BAD:]
    assert torch.equal(weights, wanted_weights)


def goes_on(folder, rank, world):
    look = Look()
    run = trainer(folder, epochs=2, callbacks=[look], world=world)
    look.comm = attach_trainer(run, MEMORY)
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS}"))
    return look.found


def test_a_run_goes_on_with_one_process_and_with_many(tmp_path):
    before = ranks(saved, tmp_path / "many")
    assert_carried(before, [alone(goes_on, tmp_path / "many", 0, 1)[1]])
    *_, residual = alone(of_one, tmp_path / "one", 1, False)
    after = ranks(lambda rank: goes_on(tmp_path / "one", rank, 3), world=3)
    assert [step for step, _ in after] == [STEPS] * 3
    assert_carried([residual], [found for _, found in after])


def logged(rank, folder):
    run = trainer(folder, report_to="tensorboard", eval_strategy="epoch", evaluates=True)
    comm = attach_trainer(run, "Cast(Mean(), bfloat16)", nonfinite="raise", verify_every=100)
    run.train()
    assert (comm.attachment.settings.nonfinite, comm.attachment.settings.verify_every) == ("raise", 100)
    return run.state.log_history


def test_metrics_arrive_in_the_logs(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    history = ranks(logged, tmp_path)[0]
    assert [line["comm/ratio"] for line in history if "loss" in line] == [2.0] * (STEPS // 2)
    assert not [line for line in history if "comm/ratio" in line and "loss" not in line]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/comm/bytes_wire")] == [2, 4, 6, 8]


def logged_by_name(rank, folder):
    run, warned = trainer(folder, report_to="none"), []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)
    attach_trainer(run, "Mean()", metrics=["comm/ratio", "comm/bytes_wired"])
    run.train()
    return warned, [
        set(line) & {"comm/ratio", "comm/bytes_wired"} for line in run.state.log_history if "loss" in line
    ]


def test_a_metric_that_is_not_there_is_named_once(tmp_path):
    warned, lines = ranks(logged_by_name, tmp_path)[0]
    assert warned == ["there is no metric 'comm/bytes_wired' to log; did you mean comm/bytes_wire?"]
    assert lines == [{"comm/ratio"}] * (STEPS // 2)


class Stop(TrainerCallback):
    """Attaches too late, and stops."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            with pytest.raises(WrongState) as caught:
                attach_trainer(self.trainer, "Mean()")
            self.told = str(caught.value)
            raise OSError("the disk is full")


def refused(rank, folder):
    def message(error, call, *args, **options):
        with pytest.raises(error) as caught:
            call(*args, **options)
        return str(caught.value)

    stop = Stop()
    run = stop.trainer = trainer(folder, callbacks=[stop], save_strategy="steps", save_steps=2)
    found = [message(WrongType, attach_trainer, "Mean()", run)]
    comm = attach_trainer(run, "Mean()")
    found += [message(WrongState, attach_trainer, run, "Noop()")]
    assert message(OSError, run.train) == "the disk is full"
    found += [stop.told]
    with pytest.raises(WrongState, match="closed"):
        comm.attachment.swap("Mean()")
    torch.distributed.barrier()
    if rank == 0:
        rmtree(folder / "checkpoint-2" / "gradlane")
    torch.distributed.barrier()
    again = trainer(folder)
    attach_trainer(again, "Mean()")
    found += [message(InvalidValue, again.train, resume_from_checkpoint=str(folder / "checkpoint-2"))]
    anew = trainer(folder)
    attach_trainer(anew, MEMORY, resume=False)
    anew.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return found


def test_what_cannot_work_is_refused_with_a_way_out(tmp_path):
    turned, twice, late, no_folder = ranks(refused, tmp_path)[0]
    assert "attach_trainer(trainer, strategy)" in turned
    assert "make a new Trainer" in twice
    assert "before trainer.train()" in late
    assert "no manifest.json" in no_folder
    assert str(tmp_path / "checkpoint-2" / "gradlane") in no_folder
    assert "attach_trainer(..., resume=False)" in no_folder
