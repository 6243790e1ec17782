import pytest
import torch

import gradlane as gl
from gradlane.core.world_change import Expected


def bucket(*slots):
    layout = tuple(gl.Slot(name, torch.Size(shape)) for name, shape in slots)
    return gl.Bucket(torch.zeros(sum(slot.numel for slot in layout)), layout, 0, 0, 1)


A, B, C = ("a", (2,)), ("b", (3,)), ("c", ())


def test_zeros_at_first_then_the_same_tensor():
    memory = gl.Memory()
    flat = memory.like(bucket(A, B))
    assert flat.tolist() == [0] * 5
    flat += 1
    assert memory.like(bucket(A, B)) is flat


def test_follows_parameters_into_other_buckets_by_name():
    memory = gl.Memory()
    memory.like(bucket(A, B)).copy_(torch.tensor([1.0, 2, 3, 4, 5]))
    memory.like(bucket(C)).fill_(9)
    assert memory.like(bucket(B, C, A)).tolist() == [3, 4, 5, 9, 1, 2]
    assert set(memory.state_dict()) == {"a", "b", "c"}


def test_half_a_move_keeps_the_other_half():
    memory = gl.Memory()
    memory.like(bucket(A, B)).copy_(torch.tensor([1.0, 2, 3, 4, 5]))
    moved = memory.like(bucket(B))
    moved += 10
    assert memory.state_dict()["b"].tolist() == [13, 14, 15]
    assert memory.state_dict()["a"].tolist() == [1, 2]
    assert memory.like(bucket(A)).tolist() == [1, 2]


def test_state_survives_another_layout(tmp_path):
    memory = gl.Memory()
    memory.like(bucket(A, B)).copy_(torch.tensor([1.0, 2, 3, 4, 5]))
    memory.put("q", torch.eye(2))
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    resumed = gl.Memory()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.like(bucket(B)).tolist() == [3, 4, 5]
    assert resumed.like(bucket(A)).tolist() == [1, 2]
    assert torch.equal(resumed.get("q"), torch.eye(2))
    saved = resumed.state_dict()
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in memory.state_dict().items()
    }


def test_refuses_another_shape_and_other_things():
    memory = gl.Memory()
    memory.load_state_dict({"a": torch.zeros(5), "b": torch.ones(3)})
    for _ in range(2):  # what was loaded does not vanish with the first refusal
        with pytest.raises(gl.InvalidValue, match=r"'a' has shape \(5,\), the parameter has \(2,\)"):
            memory.like(bucket(B, A))
    assert memory.state_dict()["b"].tolist() == [1, 1, 1]
    with pytest.raises(gl.InvalidValue, match="'a' is a str"):
        memory.load_state_dict({"a": "no tensor"})


def test_can_be_narrower_than_the_gradient():
    assert gl.Memory(torch.bfloat16).like(bucket(A)).dtype == torch.bfloat16


SLOTS = {"a": Expected(torch.Size([2]), torch.float32), "b": Expected(torch.Size([3]), torch.float32)}


def test_what_fits_a_model_and_what_does_not():
    state = {
        "a": torch.ones(2),
        "b": torch.ones(1, 3),
        "c": torch.ones(1),
        "d": torch.tensor([1]),
        "e": torch.tensor([torch.nan]),
        "f": "text",
    }
    kept, wrong = gl.Memory().fitting(state, SLOTS)
    assert list(kept) == ["a"]
    assert [text.split()[0] for text in wrong] == ["'b'", "'c'", "'d'", "'e'", "'f'"]
    kept, wrong = gl.Memory(any_shape=True).fitting(state, SLOTS)
    assert list(kept) == ["a", "b", "c"]
    assert "not finite" in wrong[1]
    kept, wrong = gl.Memory(torch.bfloat16).fitting({"a": torch.ones(2)}, SLOTS)
    assert wrong == ["'a' is of torch.float32, this memory is of torch.bfloat16"]


def test_sums_over_ranks_or_the_same_on_all():
    saved = [{"a": torch.full((2,), float(2**rank))} for rank in range(5)]
    sums = [gl.Memory().carried(saved, rank, 2)["a"][0].item() for rank in range(2)]
    assert sums == [1 + 4 + 16, 2 + 8]
    assert gl.Memory().carried(saved[:2], 2, 3) == {}
    assert gl.Memory(shared=True).carried(saved, 4, 6)["a"][0] == 1
    with pytest.raises(gl.InvalidValue, match="different shapes"):
        gl.Memory().carried([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], 0, 1)
