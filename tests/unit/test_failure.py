"""An error on its way to the trainer keeps no group open."""

import traceback
import weakref

import pytest
import torch

from gradlane.core.collectives import Request
from gradlane.lane.failure import forget_groups
from gradlane.lane.perform import issue


class Group:
    """Its connections are broken: to receive raises. In C, so that no frame of the test's own holds it."""

    recv = staticmethod(int)

    def size(self):
        return 2

    def rank(self):
        return 0


def test_a_request_that_cannot_be_issued_lets_go_of_its_group():
    group = Group()
    lives = weakref.ref(group)
    request = Request("all_to_all", ((torch.zeros(3),), (torch.ones(3),)), None, "world")
    with pytest.raises(TypeError) as caught:
        issue(group, request, 2, lambda peer, numel: torch.empty(numel, dtype=torch.uint8))
    del group
    assert lives() is not None
    forget_groups(caught.value)
    assert lives() is None
    places = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert places[-2:] == ["issue", "_exchange"]  # the traceback still says where it happened


def test_nothing_but_the_lane_is_forgotten():
    kept = object()

    def fails():
        raise ValueError(kept)

    with pytest.raises(ValueError) as caught:
        fails()
    forget_groups(caught.value)
    (*_, last) = traceback.walk_tb(caught.value.__traceback__)
    assert last[0].f_locals["kept"] is kept
