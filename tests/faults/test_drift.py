"""A rank whose weights differ is named, with the first parameter in which they do."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.feed.drift import hashed, minority
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal


def train(rank, who, at, every, strategy):
    """One bit of one weight of one rank changes in some step; what all say, and when."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with gl.attach(ddp, strategy, timeout=30, verify_every=every) as attachment:
        for step in range(12):
            if step == at and rank == who:
                bits = ddp.module.layers[2].weight.data.view(torch.int32)
                bits[3, 3] ^= 1
            optimizer.zero_grad()
            try:
                ddp(data(rank, step)).backward()
            except gl.RanksDisagree as error:
                return step, str(error)
            optimizer.step()
        return None, attachment.metrics()["comm/collectives"]


@pytest.mark.parametrize(("world", "who"), [(2, 1), (3, 0), (4, 2)])
def test_one_bit_is_found_and_named(world, who):
    for step, message in run_ranks(train, world, who, 5, 4, "ErrorFeedback(Sharded(Int8()))"):
        assert step == 7  # the first multiple of four, less one, after it
        assert f"step 7: rank {who} of {world} has drifted from the others in layers.2.weight;" in message


def test_equal_ranks_go_on_and_pay_one_small_message():
    checked = run_ranks(train, 2, 0, -1, 4, "Mean()")
    alone = run_ranks(train, 2, 0, -1, None, "Mean()")
    assert [step for step, _ in checked] == [None, None]
    assert checked[0][1] == alone[0][1] + 3  # in steps 3, 7 and 11


def join_early(rank, at):
    """Rank 0 has four batches, rank 1 eight, rank 2 eleven; one bit of rank 2's weights changes in a step."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with gl.attach(ddp, "Mean()", timeout=20, verify_every=2) as attachment:
        try:
            with ddp.join():
                for step in range((4, 8, 11)[rank]):
                    if step == at and rank == 2:
                        ddp.module.layers[2].weight.data.view(torch.int32)[3, 3] ^= 1
                    optimizer.zero_grad()
                    ddp(data(rank, step)).backward()
                    optimizer.step()
        except gl.RanksDisagree as error:
            return attachment.step, str(error)
    return attachment.step, replicas_equal(ddp.parameters())


def test_ranks_that_have_joined_take_part_and_do_not_count():
    assert run_ranks(join_early, 3, -1) == [(11, True)] * 3
    for step, message in run_ranks(join_early, 3, 6):
        assert step == 8
        assert "step 7: rank 2 of 3 has drifted from the others in layers.2.weight;" in message


def test_minority():
    assert minority([0, 1, 1]) == minority([0, 1, 0]) == minority([0, 0]) == []
    assert minority([0, 1, 0, 2]) == [3]
    assert minority([1, 1, 1]) == []
    assert minority([1, 2, 1]) == [1]
    assert minority([2, 1, 1, 3]) == [0, 3]
    assert minority([1, 2]) == [1]


def test_a_hash_sees_bits_names_and_order():
    a = torch.arange(4.0)
    assert hashed(a) == hashed(a.clone())
    assert hashed(torch.tensor(0.0)) != hashed(torch.tensor(-0.0))
    assert hashed({"x": a}) != hashed({"y": a})
    assert hashed({"x": {"y": a, "n": 1}}) == hashed({"x": {"n": 1, "y": a.clone()}})
    assert hashed(a.to(torch.bfloat16)) != hashed(a)
    assert isinstance(hashed(torch.empty(0, 3)), int)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_number_of_steps(every):
    from gradlane.feed.drift import checked_every

    with pytest.raises(gl.InvalidValue, match="use a number of steps from 1 up"):
        checked_every(every)
