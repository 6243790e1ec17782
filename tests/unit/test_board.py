"""Notes in the store: what becomes of a store that is gone, and of ranks that do not come."""

import pytest
import torch.distributed as dist

import gradlane as gl
from gradlane.agree.board import Board
from gradlane.agree.limits import Limit


def test_a_store_that_is_gone_is_a_lost_peer():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    board = Board(client, "here", 1, 2, Limit(5.0))
    board.pin("before", {})
    del server
    with pytest.raises(gl.PeerLost, match=r"swap: the store failed \(.+\); rank 0, which holds the store,"):
        board.agree("swap0", {}, doing="swap")


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(gl.PeerLost, match=r"load: rank 1 did not take part within 0.2 s") as caught:
        Board(dist.HashStore(), "here", 0, 2, Limit(0.2)).agree("load", {}, doing="load")
    assert caught.value.rank == 1
