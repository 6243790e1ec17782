"""The state of torch's PowerSGD names: checkpoints, pickles, statistics."""

import copy
import io
import logging

import pytest
import torch

import gradlane as gl
from gradlane import compat
from gradlane.local import RankFailed, run_ranks

from ..support.powersgd_hooks import hooked, soon, stepping
from ..support.training import data, flat


def life(rank, path, steps, named, megabytes, load):
    """Part of a training run in processes of its own, from a checkpoint to a checkpoint."""
    state = soon()
    if load:
        saved = torch.load(f"{path}/{rank}.pt", weights_only=True)
        state.load_state_dict(saved["comm"])
    ddp = hooked(state, compat.powerSGD_hook, bucket_cap_mb=megabytes)
    if named:
        state.name_parameters(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if load:
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert state.iter == steps[0]
    for step in steps:
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    checkpoint = {
        "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "comm": state.state_dict()
    }  # fmt: skip
    torch.save(checkpoint, f"{path}/{rank}.pt")
    return flat(ddp.parameters()), state.compression_stats(), sorted(state.error_dict)


@pytest.mark.parametrize(("named", "then"), [(False, 0.004), (True, 0.004), (True, 25)])
def test_resume_is_bit_identical(tmp_path, named, then):
    # torch keeps memory by bucket, and DDP rebuilds its buckets: after a resume it lands on other parameters;
    # and torch.load refuses the state unless weights_only=False
    whole = run_ranks(life, 2, str(tmp_path), range(9), named, 0.004, False)
    run_ranks(life, 2, str(tmp_path), range(5), named, 0.004, False)
    resumed = run_ranks(life, 2, str(tmp_path), range(5, 9), named, then, True)
    for (weights, stats, names), (again, stats_again, names_again) in zip(whole, resumed, strict=True):
        assert torch.equal(weights, again)
        assert stats == stats_again
        assert names == names_again
        assert ("layers.0.weight" in names) == named
        assert ("parameter0" in names) != named


def test_a_resume_with_names_in_one_run_only_is_refused(tmp_path):
    run_ranks(life, 2, str(tmp_path), range(4), False, 25, False)
    with pytest.raises(RankFailed, match="saved without the names of a model and is used with them"):
        run_ranks(life, 2, str(tmp_path), range(4, 6), True, 25, True)


def pickled(rank, path):
    state = soon(matrix_approximation_rank=2, random_seed=7)
    ddp = hooked(state, compat.powerSGD_hook)
    stepping(ddp, rank, range(4))
    torch.save(state, f"{path}/{rank}.pt")
    loaded = torch.load(f"{path}/{rank}.pt", weights_only=False)
    copied = copy.deepcopy(loaded)
    torch.save(state.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    plain = torch.load(buffer, weights_only=True)
    for again in (loaded, copied):
        assert again.process_group is None
        assert (again.iter, again.random_seed, again.matrix_approximation_rank) == (4, 7, 2)
        assert again.compression_stats() == state.compression_stats()
    pairs = [(state.error_dict, loaded.error_dict), (state.q_memory_dict, plain["q"])]
    other = hooked(loaded, compat.powerSGD_hook)
    return all(torch.equal(a[key], b[key]) for a, b in pairs for key in a), stepping(other, rank, range(2))


def test_pickling_as_torchs(tmp_path):
    assert run_ranks(pickled, 2, str(tmp_path)) == [(True, True)] * 2


def states_that_do_not_fit():
    good = soon().state_dict()
    yield {**good, "format": 2}, "format 2, this version reads 1"
    yield (
        {**good, "options": {**good["options"], "random_seed": 3}},
        "saved with random_seed=3, this one has 0",
    )
    yield {**good, "iter": -1}, "iter=-1; use a whole number from 0 up"
    yield {"iter": 3}, "the state lacks format, options"


@pytest.mark.parametrize(("state", "message"), list(states_that_do_not_fit()))
def test_states_that_do_not_fit_are_refused(state, message):
    with pytest.raises(gl.InvalidValue, match=message):
        soon().load_state_dict(state)


def test_a_state_may_be_read_with_options_that_change_no_gradient():
    saved = soon(orthogonalization_epsilon=1e-8, compression_stats_logging_frequency=5).state_dict()
    soon(batch_tensors_with_same_shape=True).load_state_dict(saved)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        if "PowerSGD" in record.getMessage():
            self.lines.append(record.getMessage())


def logged(rank):
    handler = Lines()
    logger = logging.getLogger("gradlane")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    state = soon(compression_stats_logging_frequency=3)
    ddp = hooked(state, compat.powerSGD_hook)
    stepping(ddp, rank, range(3))
    first = state.compression_stats()
    stepping(ddp, rank, range(3, 9))
    return handler.lines, first, state.compression_stats(), sum(p.numel() for p in ddp.parameters()) - 3


def set_before_training(rank):
    """Options count as they are when training begins."""
    state = soon()
    state.start_powerSGD_iter = 4
    ddp = hooked(state, compat.powerSGD_hook)
    stepping(ddp, rank, range(4))
    dense = state.compression_stats()
    stepping(ddp, rank, range(4, 6))
    wrong = soon()
    wrong.start_powerSGD_iter = 1
    with pytest.raises(gl.InvalidValue, match="start_powerSGD_iter=1 with use_error_feedback"):
        stepping(hooked(wrong, compat.powerSGD_hook), rank, range(1))
    return dense, state.compression_stats()[0]


def test_options_may_be_set_until_training_begins():
    for dense, rate in run_ranks(set_before_training, 2):
        assert dense == (0, 0, 0)
        assert rate > 3


def test_statistics_and_their_lines_in_the_log():
    for lines, (rate, before, after), total, numel in run_ranks(logged, 2):
        assert [line.split(":")[0] for line in lines] == [f"PowerSGD, iteration {n}" for n in (2, 5, 8)]
        assert f"{before} elements became {after}, a rate of {rate:.4g}" in lines[0]
        assert before == numel  # one compressed iteration of three; the frozen three elements do not travel
        assert rate == before / after > 1
        assert total == (rate, 7 * before, 7 * after)
