"""The helper that all process tests stand on must itself be trusted."""

import gc
import os
import time
import weakref

import pytest
import torch.distributed as dist

import gradlane as gl
from gradlane.local import RankFailed, run_ranks, tell


def test_results_come_in_rank_order():
    assert run_ranks(lambda rank, base: base + rank, 3, 10) == [10, 11, 12]


def test_reports_arrive_while_it_runs():
    reported = []
    run_ranks(lambda rank: tell((rank, "here")), 2, on_report=reported.append)
    assert sorted(reported) == [(0, "here"), (1, "here")]


def test_a_rank_that_raises_is_quoted():
    def fails(rank):
        if rank:
            raise KeyError("the reason")

    with pytest.raises(RankFailed, match=r"(?s)1 of 2 ranks failed.*rank 1.*KeyError: 'the reason'"):
        run_ranks(fails, 2, deadline=10)


def test_a_rank_that_dies_is_counted():
    def dies(rank, store):
        os._exit(7)

    with pytest.raises(RankFailed, match="ended with exit code 7"):
        run_ranks(dies, 1, init=False)


def test_past_the_deadline_every_rank_is_ended_and_says_where_it_was(capfd):
    def waits(rank):
        from torch.nn.parallel import DistributedDataParallel

        from ..support.training import build, data

        ddp = DistributedDataParallel(build(depth=1))
        gl.attach(ddp, "Mean()", timeout=60)
        if rank == 0:
            ddp(data(rank, 0)).backward()
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="2 of 2 ranks failed"):
        run_ranks(waits, 2, deadline=2)
    assert time.monotonic() - start < 10
    said = capfd.readouterr().err
    assert "rank 0 after 2 s: Mean, step 0, bucket 0" in said
    assert "phase 0: all_reduce mean(float32[" in said
    assert "rank 1 after 2 s: idle" in said


def test_worlds_without_ranks_are_refused():
    with pytest.raises(gl.InvalidValue, match="world=0 has no ranks"):
        run_ranks(print, 0)


def test_the_process_group_is_there_and_gone():
    assert run_ranks(lambda rank: dist.get_world_size(), 2) == [2, 2]
    assert not dist.is_initialized()


class Cycle:
    """Only a collector finds that nobody needs it."""

    def __init__(self):
        self.own = self


def test_a_rank_collects_its_own_garbage_and_not_its_parents():
    def collects(rank):
        own = weakref.ref(Cycle())
        gc.collect()
        return own() is None, parents() is None

    gc.disable()  # the garbage must still be there when the ranks start
    try:
        parents = weakref.ref(Cycle())
        assert run_ranks(collects, 2) == [(True, False)] * 2
    finally:
        gc.enable()
