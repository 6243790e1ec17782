"""Local steps and 1-bit Adam as one line with the Trainer of transformers."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs pip install -e ".[transformers]"')
pytest.importorskip("accelerate", reason='needs pip install -e ".[transformers]"')

from safetensors.torch import load_file  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import TrainingArguments  # noqa: E402

import gradlane as gl  # noqa: E402
from gradlane.integrations.transformers import attach_trainer  # noqa: E402
from gradlane.strategies.text import parse  # noqa: E402

from .launched import BATCH, FILES, STEPS, WORLD, alone, files_in, ranks, weights_of  # noqa: E402
from .test_transformers import InOrder, texts, tiny  # noqa: E402

ROUND = "LocalSteps(Nesterov(ErrorFeedback(Sharded(Int4()))), every=4)"
FROZEN = "LocalSteps(Mean(), every=5, warmup=3, moments='frozen')"
ONE_BIT = "After(4, SharedMomentum(ErrorFeedback(Sharded(Sign()))), Sharded(Int8()))"
SAVED = 5  # in the middle of a round, or after the freeze
LAST = 12


class Watched(InOrder):
    """Notes the weights of each evaluation."""

    def __init__(self, **options):
        super().__init__(**options)
        self.evaluated = []

    def prediction_step(self, model, *args, **options):
        self.evaluated.append(weights_of(self.model))
        return super().prediction_step(model, *args, **options)


def optimizer_of(model, strategy):
    if strategy == ROUND:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def trainer(folder, strategy, *, world=WORLD, max_grad_norm=0, callbacks=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=LAST, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=1, max_grad_norm=max_grad_norm, ddp_find_unused_parameters=False,
        disable_tqdm=True, report_to="none", logging_steps=4,
        **{"save_strategy": "steps", "save_steps": SAVED, **options},
    )  # fmt: skip
    model = tiny()
    optimizer = optimizer_of(model, strategy)
    steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Watched(model=model, args=arguments, train_dataset=texts(world), eval_dataset=texts()[:world],
                   optimizers=(optimizer, steady), callbacks=callbacks)  # fmt: skip


def by_hand(rank, strategy, world=WORLD):
    """Losses, the weights at the end, and those of the last round before step ``SAVED``."""
    model = DistributedDataParallel(tiny())
    optimizer, chosen = optimizer_of(model, strategy), parse(strategy)
    if isinstance(chosen, gl.LocalSteps):
        session = gl.local_steps(model, optimizer, chosen)
    else:
        session = gl.attach(model, chosen.first)
        gl.freeze_moments(optimizer, session, after=chosen.step, then=chosen.then.inner)
    losses = []
    with session:
        for step in range(LAST):
            first = BATCH * (world * (step % STEPS) + rank)
            rows = torch.stack([text["input_ids"] for text in texts(world)[first : first + BATCH]])
            loss = model(input_ids=rows, labels=rows).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == SAVED:
                with session.agreed():
                    agreed = weights_of(model.module)
    return losses, weights_of(model.module), agreed


def in_file(checkpoint):
    """The weights that ``from_pretrained`` would load."""
    model = tiny()
    model.load_state_dict(
        load_file(checkpoint / "model.safetensors"), strict=False
    )  # tied ones are there once
    model.tie_weights()
    return weights_of(model)


def in_parts(rank, folder, strategy, world=WORLD):
    whole = trainer(folder, strategy, world=world, eval_strategy="steps", eval_steps=SAVED)
    comm = attach_trainer(whole, strategy)
    whole.train()
    resumed = trainer(folder / "resumed", strategy, world=world, save_strategy="no")
    attach_trainer(resumed, strategy)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    return whole, comm, resumed, in_file(folder / f"checkpoint-{SAVED}")


def compared(rank, folder, strategy, world=WORLD):
    whole, comm, resumed, deployed = in_parts(rank, folder, strategy, world)
    wanted = by_hand(rank, strategy, world)
    logged = [line for line in whole.state.log_history if "loss" in line][-1]
    return (
        (whole.losses, weights_of(whole.model)), (resumed.losses, weights_of(resumed.model)), wanted,
        whole.evaluated[0], deployed, whole.optimizer.param_groups[0].get("betas", ()), logged,
        comm.attachment.metrics(),
    )  # fmt: skip


@pytest.mark.parametrize(("strategy", "world"), [(ROUND, 3), (FROZEN, 2), (ONE_BIT, 2)])
def test_it_is_the_loop_by_hand_and_resumes_bit_for_bit(strategy, world, tmp_path):
    found = ranks(compared, tmp_path, strategy, world, world=world, deadline=240)
    for whole, resumed, wanted, evaluated, deployed, betas, logged, metrics in found:
        assert whole[0] == wanted[0]
        assert resumed[0] == whole[0][SAVED:]
        assert torch.equal(whole[1], wanted[1])
        assert torch.equal(resumed[1], whole[1])
        assert torch.equal(whole[1], found[0][0][1])
        assert torch.equal(evaluated, wanted[2])
        assert torch.equal(evaluated, found[0][3])
        assert torch.equal(deployed, evaluated)
        if strategy == ONE_BIT:
            assert betas[0] == 0.0
            assert "local/ratio" not in logged
        else:
            assert metrics["local/steps"] == LAST
            assert {"local/rounds", "local/ratio", "local/drift", "comm/bytes_wire"} <= set(logged)
    expected = [name.replace("00002", f"0000{world}") for name in FILES]
    expected += [f"rank-0000{rank}-of-0000{world}" for rank in range(2, world)]
    assert files_in(tmp_path / f"checkpoint-{SAVED}" / "gradlane") == expected


class WorseAndWorse(Watched):
    """So that the first checkpoint is the best."""

    def evaluate(self, *args, **options):
        return {**super().evaluate(*args, **options), "eval_loss": float(self.state.global_step)}


def best_and_again(rank, folder):
    """The best of all checkpoints at the end; then a second train() of the same Trainer."""
    found = {}
    run = trainer(folder, ROUND, eval_strategy="steps", eval_steps=SAVED, load_best_model_at_end=True,
                  metric_for_best_model="eval_loss", greater_is_better=False)  # fmt: skip
    run.__class__ = WorseAndWorse
    attach_trainer(run, ROUND)
    run.train()
    found["best"] = weights_of(run.model), in_file(folder / f"checkpoint-{SAVED}")
    run.save_model(str(folder / "saved"))
    torch.distributed.barrier()  # rank 0 writes it
    found["saved"] = in_file(folder / "saved")
    for strategy in (FROZEN, ONE_BIT):
        run = trainer(folder / "twice", strategy, save_strategy="no")
        comm = attach_trainer(run, strategy)
        ends = []
        for _ in range(2):
            run.train()
            ends.append((weights_of(run.model), run.optimizer.param_groups[0]["betas"][0]))
        found[strategy] = ends, comm.attachment.is_open
    return found


def test_the_best_checkpoint_and_a_second_training(tmp_path):
    found = ranks(best_and_again, tmp_path, deadline=240)
    for here in found:
        weights, in_checkpoint = here["best"]
        assert torch.equal(weights, in_checkpoint)
        assert torch.equal(here["saved"], weights)
        for strategy, beta1 in ((FROZEN, 0.9), (ONE_BIT, 0.0)):
            ends, is_open = here[strategy]
            assert not is_open
            for (end, beta), (of_first, _) in zip(ends, found[0][strategy][0], strict=True):
                assert torch.equal(end, of_first)
                assert beta == pytest.approx(beta1)
            assert not torch.equal(ends[0][0], ends[1][0])


class Unlucky(Watched):
    def compute_loss(self, model, inputs, *args, **options):
        if self.unlucky and len(self.losses) == 6:
            raise OSError("no more data here")
        return super().compute_loss(model, inputs, *args, **options)


def fails(rank, folder):
    run = trainer(folder, ROUND)
    run.__class__ = Unlucky
    run.unlucky = True
    comm = attach_trainer(run, ROUND)
    with pytest.raises(OSError, match="no more data"):
        run.train()
    return weights_of(run.model), comm.attachment.is_open, comm.attachment.metrics()["local/rounds"]


def test_no_last_round_after_an_exception(tmp_path):
    (one, one_open, rounds), (two, two_open, _) = ranks(fails, tmp_path)
    assert not torch.equal(one, two)
    assert not one_open
    assert not two_open
    assert rounds == 1


def of_one(folder):
    heard, found = [], []
    logging.getLogger("gradlane").addFilter(lambda record: heard.append(record.getMessage()) or True)
    for strategy in (ROUND, ONE_BIT):
        whole, _, resumed, deployed = in_parts(0, folder / strategy[:5], strategy, 1)
        found.append((whole.losses, resumed.losses, weights_of(whole.model), weights_of(resumed.model)))
        assert torch.equal(deployed, whole.evaluated[0])
    run = trainer(folder / "clipped", ONE_BIT, world=1, max_grad_norm=1.0, save_strategy="no")
    attach_trainer(run, ONE_BIT)
    run.train()
    assert not torch.distributed.is_initialized()
    return found, heard


def test_one_process_is_ddp_of_one_rank(tmp_path):
    found, heard = alone(of_one, tmp_path, deadline=240)
    for losses, resumed, weights, resumed_weights in found:
        assert resumed == losses[SAVED:]
        assert torch.equal(resumed_weights, weights)
    ((losses, weights, _),) = ranks(by_hand, ROUND, 1, world=1)
    assert found[0][0] == losses
    assert torch.equal(found[0][2], weights)
    assert [line for line in heard if "one process: nothing is sent" in line]
    (clipping,) = [line for line in heard if "clips gradients" in line]
    assert "max_grad_norm=1.0" in clipping
    assert "max_grad_norm=0" in clipping
