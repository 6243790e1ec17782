"""The Trainer of transformers with a tiny GPT-2 made from nothing, on two processes."""

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

from ..checkpoints import owed_by  # noqa: E402
from .launched import (  # noqa: E402
    BATCH,
    FILES,
    MEMORY,
    RATE,
    STEPS,
    WORLD,
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


def texts():
    rows = torch.randint(0, 32, (WORLD * BATCH * STEPS, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    """Samples in their order, and the mean over a micro-batch as its loss: what a plain loop does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False
        self.losses = []

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **options):
        loss = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            self.losses.append(loss.item())
        return loss


def trainer(folder, *, epochs=1, accumulate=1, evaluates=False, callbacks=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=epochs, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate, max_grad_norm=0, ddp_find_unused_parameters=False,
        disable_tqdm=True, **{"save_strategy": "no", "report_to": "none", "logging_steps": 2, **options},
    )  # fmt: skip
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return InOrder(model=model, args=arguments, train_dataset=texts(), optimizers=(optimizer, steady),
                   eval_dataset=texts() if evaluates else None, callbacks=callbacks)  # fmt: skip


def plain(rank, epochs=1, accumulate=1, scaled=False):
    scaler = scaler_of(scaled)
    model = DistributedDataParallel(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    with gl.attach(model, MEMORY, scaler=scaler) as attachment:
        for _ in range(epochs):
            for step in range(STEPS):
                first = BATCH * (WORLD * step + rank)
                rows = torch.stack([text["input_ids"] for text in texts()[first : first + BATCH]])
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
    return ranks(lambda rank: plain(rank, **options))


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
    return owed_by(comm.attachment.strategy)


class Look(TrainerCallback):
    """What is there when the first step begins."""

    def on_step_begin(self, args, state, control, **kwargs):
        if not hasattr(self, "found"):
            self.found = self.comm.attachment.step, owed_by(self.comm.attachment.strategy)


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
    assert_carried(before, [owed for _, owed, _ in after])
    assert all(torch.equal(weights, after[0][-1]) for *_, weights in after)


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


def test_one_process_is_refused(tmp_path):
    with pytest.raises(WrongType, match=r"NOT_PARALLEL.* torchrun --nproc-per-node 2"):
        attach_trainer(trainer(tmp_path), "Mean()")
