"""What may lie in a checkpoint's folder: other files stay, and what is no file is refused at once."""

import json
import os
import threading
from hashlib import sha256

import pytest
import torch

import gradlane as gl
from gradlane.checkpoint import folder as folders
from gradlane.checkpoint.files import Files
from gradlane.checkpoint.manifest import Manifest, file_name
from gradlane.checkpoint.rankfile import MAGIC, Receipt, read, write

TOKEN, OLD = "0123456789abcdef", "f" * 16


def saved(folder):
    """A checkpoint of one rank."""
    name = file_name(0, 1, TOKEN)
    head = {"format": 1, "token": TOKEN, "rank": 0, "world": 1, "parts": []}
    receipt = folders.write_whole(folder, name, lambda file: write(file, head, {"a": torch.ones(3)}))
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
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*theirs, folders.MANIFEST, manifest.file(0)])


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
@pytest.mark.parametrize("whose", ["manifest", "rank"])
def test_what_is_no_file_is_refused_and_nobody_waits(tmp_path, what, whose):
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
    assert f"{path.name} is no file" in message


def test_a_symbolic_link_to_a_whole_file_is_as_good(tmp_path):
    manifest = saved(tmp_path)
    path = tmp_path / manifest.file(0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    assert Files(tmp_path, folders.checkpoints_in(tmp_path)[0])[0]["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity", "1" * 21])
def test_numbers_that_are_none_are_refused(tmp_path, text):
    header = json.dumps({"entries": [[["steps"], 7.5]]}).replace("7.5", text).encode()
    header += b" " * (-(16 + len(header)) % 64)
    data = MAGIC + len(header).to_bytes(8, "little") + header
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(gl.InvalidValue, match="number"):
        read(tmp_path / "x", Receipt(len(data), sha256(data).hexdigest()))
