"""Models of FSDP2 in the Trainer of transformers, on two ranks and two times two.

The Trainer shards by Accelerate's plugin, or trains a model that ``from_pretrained`` has sharded.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs pip install -e ".[transformers]"')
pytest.importorskip("accelerate", reason='needs pip install -e ".[transformers]"')

from accelerate import ParallelismConfig  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from gradlane.errors import InvalidValue, WrongType  # noqa: E402
from gradlane.integrations.transformers import attach_trainer  # noqa: E402

from .accelerate_on_cpus import let_cpus_shard  # noqa: E402
from .fsdp_runs import LOSSY, ONE, TWO, WITH_OPTIMIZER, results, same_training, world_of  # noqa: E402
from .launched import BAD, BATCH, RATE, STEPS, files_in, ranks  # noqa: E402
from .test_transformers import InOrder, texts  # noqa: E402


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def by_plugin(shape, folder):
    """The model, and the arguments with which the Trainer shards it. On CPUs Accelerate needs help."""
    let_cpus_shard()
    arguments = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    if len(shape) == 2:
        parallel = ParallelismConfig(dp_replicate_size=shape[0], dp_shard_size=shape[1])
        arguments["parallelism_config"] = parallel
    return llama(), arguments


def when_loaded(shape, folder):
    """A model that is sharded when it is loaded, on any device."""
    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder / "llama")
    torch.distributed.barrier()
    sizes = DistributedConfig(fsdp_size=shape[-1], dp_replicate_size=shape[0] if len(shape) == 2 else 1)
    return AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=sizes), {}


WAYS = [by_plugin, when_loaded]


def trainer(folder, model, shape, *, epochs=1, without=None, **options):
    rows = texts(world_of(shape))
    if without is not None:
        step = world_of(shape) * BATCH
        del rows[without * step : (without + 1) * step]
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=epochs, per_device_train_batch_size=BATCH,
        optim="sgd", optim_args="momentum=0.9", learning_rate=RATE, lr_scheduler_type="constant",
        disable_tqdm=True, **{"save_strategy": "no", "report_to": "none", "logging_steps": 2, **options},
    )  # fmt: skip
    return InOrder(model=model, args=arguments, train_dataset=rows)


def trained(rank, way, shape, folder, text, options, unlucky=False):
    model, arguments = way(shape, folder)
    run = trainer(folder, model, shape, **arguments, **options)
    run.unlucky = unlucky and rank == world_of(shape) - 1
    comm = attach_trainer(run, text) if text else None
    run.train()
    found = results(run.losses, run.model, comm.attachment if comm else None)
    return found if comm is None else (*found, comm.attachment.metrics(), run.state.log_history)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["", "accumulated"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_is_the_trainer_without_gradlane(way, shape, options, tmp_path):
    world = world_of(shape)
    native = ranks(trained, way, shape, tmp_path, None, options, world=world)
    assert same_training(ranks(trained, way, shape, tmp_path, "Mean()", options, world=world), native)
    lossy = ranks(trained, way, shape, tmp_path, LOSSY[shape], options, world=world)
    assert not same_training(lossy, native)
    assert all(rank[1].isfinite().all() for rank in lossy)
    assert lossy[0][3]["comm/step/ratio"] > (2 if shape == TWO else 1.5)
    assert [line["comm/bytes_wire"] > 0 for line in lossy[0][4] if "loss" in line]


@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_is_not_finite_is_skipped_by_all(way, shape, tmp_path):
    world = world_of(shape)
    found = ranks(trained, way, shape, tmp_path, LOSSY[shape], {}, True, world=world)
    without = ranks(trained, way, shape, tmp_path, LOSSY[shape], {"without": BAD}, world=world)
    for (losses, weights, _, metrics, _), wanted in zip(found, without, strict=True):
        assert (metrics["comm/skipped"], metrics["comm/steps"]) == (1, STEPS)
        assert losses[:BAD] + losses[BAD + 1 :] == wanted[0]
        assert torch.equal(weights, wanted[1])


def interrupted(rank, shape, folder, state_dict):
    found = []
    for where in (None, str(folder / "checkpoint-6")):
        model, arguments = by_plugin(shape, folder)
        arguments["fsdp_config"]["state_dict_type"] = state_dict
        run = trainer(folder, model, shape, epochs=2, save_strategy="steps", save_steps=6, **arguments)
        comm = attach_trainer(run, LOSSY[shape])
        run.train(resume_from_checkpoint=where)
        found.append(results(run.losses, run.model, comm.attachment))
        torch.distributed.barrier()
    (whole, weights, _), (rest, resumed, _) = found
    return whole[6:] == rest, torch.equal(weights, resumed)


@pytest.mark.parametrize("state_dict", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=str)
def test_a_resumed_run_is_the_run_that_never_stopped(shape, state_dict, tmp_path):
    assert ranks(interrupted, shape, tmp_path, state_dict, world=world_of(shape)) == [
        (True, True)
    ] * world_of(shape)
    assert len(files_in(tmp_path / "checkpoint-6" / "gradlane")) == 1 + world_of(shape)


def refused(rank, folder):
    found = []
    for text in WITH_OPTIMIZER:
        model, _ = when_loaded(ONE, folder)
        run = trainer(folder, model, ONE)
        attach_trainer(run, text)
        with pytest.raises(InvalidValue) as caught:
            run.train()
        found.append(str(caught.value))
    return found


def test_what_needs_full_copies_is_refused(tmp_path):
    for local, momentum in ranks(refused, tmp_path):
        assert "LocalSteps" in local
        assert "After" in momentum
        assert all(
            "with FSDP each rank has a part of the model; use DDP" in text for text in (local, momentum)
        )


def of_fsdp1(rank, folder):
    """Neither the Trainer nor Accelerate wraps a model in FSDP1 on CPUs."""
    run = trainer(folder, llama(), ONE)
    comm = attach_trainer(run, "Mean()")
    run.model_wrapped = FullyShardedDataParallel(llama(), device_id=torch.device("cpu"))
    with pytest.raises(WrongType) as caught:
        comm.on_train_begin(run.args, run.state, run.control)
    return str(caught.value)


def test_fsdp1_is_refused_with_the_way_to_fsdp2(tmp_path):
    for found in ranks(of_fsdp1, tmp_path):
        assert "FSDP1" in found
        assert "fsdp_config={'fsdp_version': 2}" in found
