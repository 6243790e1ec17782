import pytest
import torch

import gradlane as gl


def bucket(**changes):
    layout = (gl.Slot("a.weight", torch.Size((2, 3))), gl.Slot("a.scale", torch.Size(())))
    fields = {"flat": torch.arange(7.0), "layout": layout, "step": 3, "rank": 1, "world": 4}
    return gl.Bucket(**{**fields, **changes})


def test_gradients_are_views_by_name():
    given = bucket()
    weight, scale = given.tensors()
    assert weight.shape == (2, 3)
    assert scale.shape == ()
    assert list(given.named()) == ["a.weight", "a.scale"] == list(given.names)
    weight.zero_()
    assert given.flat.tolist() == [0, 0, 0, 0, 0, 0, 6]


def test_seed_is_a_function_of_place():
    given = bucket()
    assert given.seed(1, shared=True) == bucket(rank=0, flat=torch.zeros(7)).seed(1, shared=True)
    assert given.seed(1, shared=False) != bucket(rank=0).seed(1, shared=False)
    others = [
        given.seed(2, shared=True),
        given.seed(1, shared=False),
        bucket(step=4).seed(1, shared=True),
        bucket(layout=given.layout[:1], flat=torch.zeros(6)).seed(1, shared=True),
    ]
    assert given.seed(1, shared=True) not in others
    assert len(set(others)) == len(others)
    torch.Generator().manual_seed(given.seed(1, shared=True))  # fits


def test_with_flat_keeps_the_rest_and_refuses_another_size():
    given = bucket()
    assert given.with_flat(torch.ones(7)).layout is given.layout
    with pytest.raises(gl.InvalidValue, match=r"shape \(3,\).*\(7,\)"):
        given.with_flat(torch.ones(3))


def test_divisor_counts_the_world_unless_told_otherwise():
    assert bucket().divisor() == 4
    assert bucket(sizes={"world": 3, "node": 2}).divisor() == 3
    assert bucket(sizes={"world": 3, "node": 2}).divisor("node") == 2
