"""Local steps and 1-bit Adam as one line in Lightning, Fabric and Accelerate."""

import importlib.util
import logging

import pytest
import torch

from gradlane.errors import InvalidValue, WrongState

from . import optimizer_runs as runs
from .launched import STEPS, Model, alone, batches_of, ranks

ROUND = "LocalSteps(Nesterov(ErrorFeedback(Sharded(Int4()))), every=3)"
STREAM = "LocalSteps(Mean(), every=4, fragments=2, delay=1, blend=0.5)"
FROZEN = "LocalSteps(Mean(), every=5, warmup=4, first=Sharded(Int8()), moments='frozen')"
ONE_BIT = "After(5, SharedMomentum(ErrorFeedback(Sharded(Sign()))), Sharded(Int8()))"
LATER = "After(10, SharedMomentum(ErrorFeedback(Sharded(Sign()))))"
CASES = {  # strategy and options; there is a checkpoint after ``STEPS`` steps
    "in the middle of a round": (ROUND, {"accumulate": 2}),
    "a round is under way": (STREAM, {}),
    "after a warm-up": (FROZEN, {}),
    "after the freeze": (ONE_BIT, {}),
    "before the freeze": (LATER, {}),
}
ROUNDS = {ROUND: 2 + 1, STREAM: 8 + 1, FROZEN: 2 + 1}  # one is the last
# With nobody to exchange gradients with, a warm-up does not round them.
ALONE = (ROUND, FROZEN.replace("first=Sharded(Int8()), ", ""), ONE_BIT)
RUNS = {
    "lightning": ("lightning", runs.lightning),
    "fabric": ("lightning", runs.fabric),
    "accelerate": ("accelerate", runs.accelerate),
}


@pytest.fixture(params=RUNS)
def run(request):
    return installed(*RUNS[request.param])


def installed(framework, function):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    return function


def in_parts(rank, run, world, strategy, folder, **options):
    """Two epochs in one go, and in two parts; everything but the checkpoint is forgotten in between."""
    return (
        run(rank, world, strategy, folder / "whole", 0, 2, **options),
        run(rank, world, strategy, folder / "parts", 0, 1, **options),
        run(rank, world, strategy, folder / "parts", 1, 2, **options),
    )


def assert_resumed(found):
    """On all ranks; ``found`` has what ``in_parts`` returned on each."""
    for whole, first, second in found:
        evaluated = first.evaluated + second.evaluated
        assert str(first.losses + second.losses) == str(whole.losses)  # a loss may be nan
        assert torch.equal(second.weights, whole.weights)
        assert (second.betas, second.scale) == (whole.betas, whole.scale)
        assert len(evaluated) == len(whole.evaluated) == len(whole.deployed) == 2
        assert all(map(torch.equal, whole.evaluated, evaluated))
        # All ranks have the same weights in the end, in evaluations, and in the file that is deployed.
        assert torch.equal(whole.weights, found[0][0].weights)
        assert all(map(torch.equal, whole.evaluated, found[0][0].evaluated))
        assert all(map(torch.equal, whole.deployed, whole.evaluated))


def assert_by_hand(found, wanted):
    for (whole, *_), same in zip(found, wanted, strict=True):
        assert whole.losses == same.losses
        assert torch.equal(whole.weights, same.weights)
        assert all(map(torch.equal, whole.evaluated, same.evaluated))
        assert whole.betas == same.betas
        assert whole.metrics["comm/bytes_wire"] == same.metrics["comm/bytes_wire"] > 0


def all_cases(rank, run, folder):
    found = {}
    for name, (strategy, options) in CASES.items():
        by_hand = runs.by_hand(rank, 2, strategy, 2, **options)
        found[name] = by_hand, in_parts(rank, run, 2, strategy, folder / name, **options)
    return found


def test_it_is_the_loop_by_hand_and_resumes_bit_for_bit(run, tmp_path):
    found = ranks(all_cases, run, tmp_path, deadline=240)
    for name, (strategy, _) in CASES.items():
        wanted, here = zip(*(of_rank[name] for of_rank in found), strict=True)
        assert_resumed(here)
        assert_by_hand(here, wanted)
        whole = here[0][0]
        if strategy in ROUNDS:
            assert whole.metrics["local/rounds"] == ROUNDS[strategy]
            assert not torch.equal(whole.evaluated[-1], whole.weights)  # a last round comes after it
        else:
            assert whole.betas[0] == 0.0  # the momentum is in what arrives


def by_three(rank, run, folder):
    return runs.by_hand(rank, 3, ROUND, 2), in_parts(rank, run, 3, ROUND, folder)


def test_three_ranks(run, tmp_path):
    wanted, here = zip(*ranks(by_three, run, tmp_path, world=3, deadline=240), strict=True)
    assert_resumed(here)
    assert_by_hand(here, wanted)
    assert len({tuple(whole.losses) for whole, *_ in here}) == 3


def overflowing(rank, run, folder):
    return in_parts(rank, run, 2, ROUND, folder, scaled=True)


def test_a_step_that_one_scaler_leaves_out_shifts_no_round(run, tmp_path):
    found = ranks(overflowing, run, tmp_path, deadline=240)
    assert_resumed(found)
    assert found[0][0].scale != found[1][0].scale  # each rank resumes with its own
    for whole, *_ in found:
        assert whole.metrics["local/steps"] == 2 * STEPS
        assert whole.weights.isfinite().all()


def by_lightning_manually(rank, folder):
    found = []
    for strategy in (ROUND, FROZEN):
        by_hand = runs.by_hand(rank, 2, strategy, 2)
        found.append((by_hand, in_parts(rank, runs.manual, 2, strategy, folder / strategy[11:15])))
    return found


def test_optimizing_by_hand_in_lightning_stays_local(tmp_path):
    installed(*RUNS["lightning"])
    for pairs in zip(*ranks(by_lightning_manually, tmp_path, deadline=240), strict=True):
        wanted, here = zip(*pairs, strict=True)
        assert_resumed(here)
        assert_by_hand(here, wanted)


def lightning_again(rank, folder):
    """Two fits of a module, with a checkpoint that it saves while it validates; then one that raises."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradlane.integrations.lightning import GradientComm

    from .lightning_runs import Module, trainer

    found = {}
    for strategy in (ROUND, ONE_BIT):
        module, comm = Module(), GradientComm(strategy)
        module.configure_optimizers = lambda m=module, s=strategy: runs.optimizer_of(m, s)
        run = trainer(comm, num_sanity_val_steps=0)
        path = folder / f"{strategy[:5]}.ckpt"
        module.on_validation_epoch_end = lambda r=run, p=path: r.save_checkpoint(p)
        ends = []
        for epochs in (1, 2):
            run.fit_loop.max_epochs = epochs
            run.fit(module, batches_of(rank), batches_of(rank))
            norm = comm.attachment.metrics()["comm/residual_norm"]
            ends.append((runs.weights_of(module), comm.attachment.metrics().get("local/steps"), norm))
        saved = torch.load(path, weights_only=True)
        found[strategy] = ends, runs.flat(saved["state_dict"]), saved["callbacks"]["GradientComm"]
    module, comm = Module(), GradientComm(ROUND)
    module.on_train_batch_end = lambda outputs, batch, index: 1 / (index < 4)  # on all ranks, after step 5
    saver = ModelCheckpoint(folder, "raised", save_on_exception=True)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer(comm, saver).fit(module, batches_of(rank))
    torch.distributed.barrier()
    saved = torch.load(folder / "raised.ckpt", weights_only=True)
    found["raised"] = (
        runs.weights_of(module),
        runs.flat(saved["state_dict"]),
        saved["callbacks"]["GradientComm"],
    )
    return found, getattr(caught.value, "__notes__", [])


def test_a_second_fit_in_lightning_and_one_that_raises(tmp_path):
    installed(*RUNS["lightning"])
    (one, notes), (two, _) = ranks(lightning_again, tmp_path)
    for strategy in (ROUND, ONE_BIT):
        (ends, deployed, position), (others, *_) = one[strategy], two[strategy]
        for (weights, steps, norm), (other, *_) in zip(ends, others, strict=True):
            assert torch.equal(weights, other)
            assert steps == (STEPS if strategy == ROUND else None)  # it counts from 0, with a new optimizer
            assert norm > 0
        assert not torch.equal(ends[0][0], ends[1][0])
        if strategy == ROUND:
            assert position == {"step": 2, "local_steps": STEPS}
        assert deployed.isfinite().all()
    (own, deployed, position), (other, *_) = one["raised"], two["raised"]
    assert not torch.equal(own, other)  # no last round
    assert not torch.equal(deployed, own)  # the weights of the last one are in the file
    assert position == {"step": 1, "local_steps": 5}
    assert notes == []
    assert len(list((tmp_path / "raised.ckpt.gradlane").iterdir())) == 3


def of_one(run, folder):
    heard = []
    logging.getLogger("gradlane").addFilter(lambda record: heard.append(record.getMessage()) or True)
    found = [in_parts(0, run, 1, strategy, folder / str(n)) for n, strategy in enumerate(ALONE)]
    assert not torch.distributed.is_initialized()
    return found, heard


def test_one_process_is_ddp_of_one_rank(run, tmp_path):
    found, heard = alone(of_one, run, tmp_path, deadline=240)
    wanted = ranks(lambda rank: [runs.by_hand(0, 1, strategy, 2) for strategy in ALONE], world=1)[0]
    assert len([line for line in heard if "one process: nothing is sent" in line]) == 9
    for here, by_hand in zip(found, wanted, strict=True):
        assert_resumed([here])
        assert here[0].losses == by_hand.losses
        assert torch.equal(here[0].weights, by_hand.weights)
        assert here[0].metrics["comm/bytes_wire"] == 0


def message(error, call, *args, **options):
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def refused_by_lightning(rank):
    from gradlane.integrations.lightning import GradientComm

    from .lightning_runs import Module, trainer

    def fit(strategy, optimizers):
        module = Module()
        module.automatic_optimization = optimizers == 1
        module.configure_optimizers = lambda: [
            torch.optim.AdamW(module.network[2 * index].parameters()) for index in range(optimizers)
        ]
        trainer(GradientComm(strategy)).fit(module, batches_of(rank))

    refreshing = ONE_BIT[:-1] + ", refresh=2)"
    return [message(InvalidValue, fit, ROUND, 2), message(InvalidValue, fit, refreshing, 1)]


def refused_by_fabric(rank):
    from lightning.fabric import Fabric

    from gradlane.integrations.lightning import attach_fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(Model())
    return [message(InvalidValue, attach_fabric, fabric, model, strategy) for strategy in (ROUND, ONE_BIT)]


def refused_by_accelerate(rank):
    from accelerate import Accelerator

    from gradlane.integrations.accelerate import attach_accelerate

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model())
    found = [message(InvalidValue, attach_accelerate, accelerator, model, ROUND)]
    for layer in (model.module.network[0], model.module.network[2]):
        accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.1))
    found += [message(InvalidValue, attach_accelerate, accelerator, model, ROUND)]
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach_accelerate(accelerator, model, ROUND, optimizer=own):
        found += [message(WrongState, attach_accelerate, accelerator, model, ROUND, optimizer=own)]
    return found


REFUSED = {
    "lightning": (refused_by_lightning, ["has returned 2; return one", "refresh=2, and Lightning runs"]),
    "fabric": (refused_by_fabric, ["write attach_fabric(fabric, module, strategy, optimizer=optimizer)"] * 2),
    "accelerate": (
        refused_by_accelerate,
        ["and 0 of those", "and 2 of those that prepare has returned train this model", "close() it first"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_a_way_out(name):
    installed(*RUNS[name])
    function, expected = REFUSED[name]
    for found in ranks(function):
        assert len(found) == len(expected)
        for told, part in zip(found, expected, strict=True):
            assert part in told
