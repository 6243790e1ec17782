"""What may lie in a checkpoint's folder: other files stay, and what is not a file is refused at once."""

import io
import json
import os
import threading
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save

import gradlane as gl
from gradlane.checkpoint import folder as folders
from gradlane.checkpoint.files import Files
from gradlane.checkpoint.manifest import FORMAT, Manifest, file_name
from gradlane.checkpoint.rankfile import Receipt, read, write

from ..support.checkpoints import OLD_CHECKPOINT

TOKEN, OLD = "0123456789abcdef", "f" * 16


def saved(folder):
    """A checkpoint of one rank."""
    name = file_name(0, 1, TOKEN)
    head = {"format": FORMAT, "token": TOKEN, "rank": 0, "world": 1, "parts": []}
    receipt = folders.write_atomically(folder, name, lambda file: write(file, head, {"a": torch.ones(3)}))
    manifest = Manifest(TOKEN, 4, "Mean()", (), [], (receipt,))
    folders.commit(folder, manifest, None)
    return manifest


def refused_soon(call):
    """What a call that must not wait raised; None if it is still waiting."""
    raised = []

    def run():
        with pytest.raises(gl.InvalidValue) as caught:
            call()
        raised.append(str(caught.value))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    return raised[0] if raised else None


def test_only_what_save_has_written_is_removed(tmp_path):
    theirs = [
        "rank-0-of-1.pt",
        "rank-00000-of-00001",
        "rank-00000-of-00001-model.state",
        "rank-of-of-x",
        "model.pt",
    ]
    ours = [file_name(0, 1, OLD), file_name(3, 4, OLD), file_name(1, 2, OLD) + folders.UNFINISHED]
    for name in theirs + ours:
        (tmp_path / name).write_text("something")
    manifest = saved(tmp_path)
    folders.clean(tmp_path, manifest)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == sorted([*theirs, folders.MANIFEST, manifest.file(0)])


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
@pytest.mark.parametrize("whose", ["manifest", "rank"])
def test_anything_but_a_file_is_refused_at_once(tmp_path, what, whose):
    manifest = saved(tmp_path)
    path = tmp_path / (folders.MANIFEST if whose == "manifest" else manifest.file(0))
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    message = refused_soon(lambda: Files(tmp_path, folders.checkpoints_in(tmp_path)[0])[0])
    assert message is not None
    assert f"{path.name} is not a file" in message


def test_a_symbolic_link_to_a_file_is_read(tmp_path):
    manifest = saved(tmp_path)
    path = tmp_path / manifest.file(0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    assert Files(tmp_path, folders.checkpoints_in(tmp_path)[0])[0]["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity", "1" * 21, "null", "[1]"])
def test_values_that_are_not_finite_numbers_are_refused(tmp_path, text):
    document = json.dumps({"values": [[["steps"], 7.5]]}).replace("7.5", text)
    data = save({}, {"gradlane": document})
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(gl.InvalidValue, match=r"'steps' is .*not a number or a string"):
        read(tmp_path / "x", Receipt(len(data), sha256(data).hexdigest()))


def test_a_bool_tensor_with_other_bytes_is_refused(tmp_path):
    data = save({"/seen": torch.tensor([True, False])}, {"gradlane": json.dumps({"values": []})})
    data = data[:-1] + b"\x02"
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(gl.InvalidValue, match="'/seen' has a byte above 1"):
        read(tmp_path / "x", Receipt(len(data), sha256(data).hexdigest()))


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_comes_back_as_it_was(tmp_path, dtype):
    matrix = torch.arange(6).reshape(2, 3).to(dtype)
    state = {
        "memory": {"a/b~1": matrix.t(), "row": matrix[0], "again": matrix},  # three views of one storage
        "empty": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.tensor(1).to(dtype),
        "none": {},
        "numbers": {"int": -3, "float": 1e300, "bool": True, "text": "\u00e9"},
    }
    with (tmp_path / "x").open("wb") as file:
        receipt = write(file, {"format": FORMAT}, state)
    head, found = read(tmp_path / "x", receipt)
    assert head == {"format": FORMAT}
    assert {**found, "memory": None, "empty": None, "scalar": None} == {
        **state, "memory": None, "empty": None, "scalar": None
    }  # fmt: skip
    for name, tensor in state["memory"].items():
        assert torch.equal(found["memory"][name], tensor)
    for name in ("empty", "scalar"):
        assert torch.equal(found[name], state[name])
        assert found[name].dtype == dtype


def test_any_reader_of_safetensors_reads_the_tensors(tmp_path):
    manifest = saved(tmp_path)
    assert load_file(tmp_path / manifest.file(0))["/a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_tensors_that_a_file_cannot_hold_are_named(tensor):
    with pytest.raises(gl.InvalidValue, match=r"a tensor of .*(complex128|sparse).* in 'a'"):
        write(io.BytesIO(), {}, {"a": tensor})


def test_a_checkpoint_of_the_old_format_is_refused_with_a_sentence_that_says_so():
    with pytest.raises(
        gl.InvalidValue, match=r"has format 1, of an older gradlane; this one reads format 2 only"
    ):
        folders.checkpoints_in(OLD_CHECKPOINT)


def test_a_save_over_an_old_checkpoint_removes_its_files(tmp_path):
    for path in OLD_CHECKPOINT.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = saved(tmp_path)
    folders.clean(tmp_path, manifest)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders.MANIFEST, manifest.file(0)]
