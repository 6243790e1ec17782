"""Ways to damage a checkpoint. Each makes a copy of a folder into one that must be refused."""

import json
import os
import pickle
import random
import shutil
from hashlib import sha256
from pathlib import Path

import torch

from gradlane.checkpoint.manifest import file_name


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, touched):
        self.touched = touched

    def __reduce__(self):
        return (os.system, (f"touch {self.touched}",))


class Damage:
    """One copy of a checkpoint, open for damage."""

    def __init__(self, folder, chance, touched):
        self.folder, self.chance, self.touched = Path(folder), chance, touched
        self.manifest = self.folder / "manifest.json"
        self.document = json.loads(self.manifest.read_bytes())
        self.files = [self.folder / file["name"] for file in self.document["files"]]

    def any_file(self):
        return self.chance.choice([self.manifest, *self.files])

    def sealed(self):
        """Write the manifest anew, with right sizes and digests: whoever made this knows the format."""
        for file, path in zip(self.document["files"], self.files, strict=False):
            if path.is_file():
                data = path.read_bytes()
                file["size"], file["sha256"] = len(data), sha256(data).hexdigest()
        self.seal_manifest()

    def seal_manifest(self):
        document = {key: value for key, value in self.document.items() if key != "sha256"}
        document["sha256"] = sha256(text(document)).hexdigest()
        self.manifest.write_bytes(text(document))

    def in_header(self, change):
        """Change one rank's header of safetensors, and seal it."""
        path = self.chance.choice(self.files)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        changed = changed if isinstance(changed, bytes) else json.dumps(header).encode()
        changed += b" " * (-len(changed) % 8)
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
        self.sealed()

    def in_tensor(self, change):
        def changed(header):
            tensors = [value for name, value in header.items() if name != "__metadata__"]
            change(self.chance.choice(tensors))

        self.in_header(changed)

    def in_document(self, change):
        """Change our JSON in the metadata of one rank's file, and seal it."""

        def changed(header):
            document = json.loads(header["__metadata__"]["gradlane"])
            written = change(document)
            written = written if isinstance(written, str) else json.dumps(document)
            header["__metadata__"]["gradlane"] = written

        self.in_header(changed)


def text(document):
    return json.dumps(document, indent=1).encode() + b"\n"


def bit_flip(damage):
    path = damage.any_file()
    data = bytearray(path.read_bytes())
    data[damage.chance.randrange(len(data))] ^= 1 << damage.chance.randrange(8)
    path.write_bytes(data)


def truncated(damage):
    path = damage.any_file()
    os.truncate(path, damage.chance.randrange(path.stat().st_size))


def longer(damage):
    path = damage.any_file()
    with path.open("ab") as file:
        file.write(damage.chance.randbytes(damage.chance.randint(1, 100)))


def random_bytes(damage):
    path = damage.any_file()
    path.write_bytes(damage.chance.randbytes(path.stat().st_size))


def zeros(damage):
    path = damage.any_file()
    data = bytearray(path.read_bytes())
    start = damage.chance.randrange(len(data) - 16)
    if not any(data[start : start + 512]):
        start = 0
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def missing(damage):
    damage.any_file().unlink()


def folder_instead(damage):
    path = damage.any_file()
    path.unlink()
    path.mkdir()


def exchanged(damage):
    one, other = damage.files
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)
    if damage.chance.random() < 0.5:
        damage.sealed()


def pickled(damage):
    path = damage.any_file()
    if damage.chance.random() < 0.5:
        path.write_bytes(pickle.dumps(Payload(damage.touched)))
    else:
        torch.save({"state": Payload(damage.touched)}, path)
    if damage.chance.random() < 0.5 and path != damage.manifest:
        damage.sealed()


def huge_shape(damage):
    sizes = [[10**15], [10**9, 10**9], [2**62, 4], [2**64], [10**19]]
    damage.in_tensor(lambda tensor: tensor.update(shape=damage.chance.choice(sizes)))


def other_shape(damage):
    def change(tensor):
        shape = tensor["shape"]
        other = [*shape[1:], shape[0]] if len(set(shape)) > 1 else [*shape, 2] if shape else [1]
        tensor["shape"] = other

    damage.in_tensor(change)


def bad_shape(damage):
    shapes = [[-1], ["3"], [2.5], "abc", None, [[2]], [True], {}]
    damage.in_tensor(lambda tensor: tensor.update(shape=damage.chance.choice(shapes)))


def other_offsets(damage):
    def change(tensor):
        start, end = tensor["data_offsets"]
        choices = [[start + 8, end + 8], [start, end + 8], [end, start], [-8, end], [0, 10**15], [start]]
        choices += [["0", end], None, [2**64, 2**64 + 8], [start + 0.5, end]]
        tensor["data_offsets"] = damage.chance.choice(choices)

    damage.in_tensor(change)


def other_dtype(damage):
    names = ["F64", "I32", "C64", "object", "BOOL", "", 3, "__class__"]
    damage.in_tensor(
        lambda tensor: tensor.update(dtype=damage.chance.choice([n for n in names if n != tensor["dtype"]]))
    )


def not_finite(damage):
    """A value in a memory of float32 becomes NaN or infinite."""
    path = damage.chance.choice(damage.files)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    places = [
        value["data_offsets"] for name, value in header.items()
        if name != "__metadata__" and value["dtype"] == "F32" and 0 not in value["shape"]
    ]  # fmt: skip
    first, end = damage.chance.choice(places)
    at = start + damage.chance.randrange(first, end, 4)
    value = damage.chance.choice([float("nan"), float("inf"), -float("inf")])
    data[at : at + 4] = torch.tensor([value]).numpy().tobytes()
    path.write_bytes(data)
    damage.sealed()


def other_name(damage):
    """One tensor has another name, or is missing from the header while its bytes are there."""
    names = ["/memory/no.such.parameter", "memory/cube", "", "/memory", "/", "/somewhere/else", "/a~2b"]

    def change(header):
        name = damage.chance.choice([name for name in header if name != "__metadata__"])
        tensor = header.pop(name)
        if damage.chance.random() < 0.8:
            header[damage.chance.choice([*names, name + "/inside"])] = tensor

    damage.in_header(change)


def other_value(damage):
    tensor = ["memory", "cube"]
    changes = [
        lambda values: values.extend([[["memory", "x"], 3], [["memory", "x"], 3]]),
        lambda values: values.append([["memory", "no.such.parameter"], 3]),
        lambda values: values.append([["somewhere", "else"], 3]),
        lambda values: values.append([tensor, 3]),
        lambda values: values.append([[*tensor, "inside"], 3]),
        lambda values: values.append([[], 3]),
        lambda values: values.append([[3], 3]),
        lambda values: values.append([["memory", "x"], None]),
        lambda values: values.append([["memory", "x"], [1, 2]]),
        lambda values: values.append([["memory", "x"], {"dtype": "F32"}]),
        lambda values: values.append([["memory", "x"], float("nan")]),
        lambda values: values.append([["memory", "x"], 10**30]),
        lambda values: values.append(["memory", {"dtype": "F32"}]),
        lambda values: values.append(5),
    ]
    damage.in_document(lambda document: damage.chance.choice(changes)(document["values"]))


def other_document(damage):
    deep = '{"values": ' + "[" * 100_000 + "]" * 100_000 + "}"
    digits = '{"values": [[["a"], ' + "9" * 1_000_000 + "]]}"
    constant = '{"values": [[["a"], NaN]]}'
    documents = [deep, digits, constant, "[]", "3", "{}", "", '{"values": 3}', "null"]
    damage.in_document(lambda document: damage.chance.choice(documents))


def other_header(damage):
    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    headers = [deep, b"[]", b"3", b"{}", b"\xff\xfe", b'{"__metadata__": 3}', b'{"__metadata__": {}}', b""]
    damage.in_header(lambda header: damage.chance.choice(headers))


def no_metadata(damage):
    damage.in_header(lambda header: header.pop("__metadata__") and None)


def other_head(damage):
    key, value = damage.chance.choice(
        [("rank", 5), ("world", 9), ("token", "0" * 16), ("format", 7), ("rank", "0"), ("format", None)]
    )
    damage.in_document(lambda document: document.__setitem__(key, value))


def header_length(damage):
    path = damage.chance.choice(damage.files)
    data = bytearray(path.read_bytes())
    length = damage.chance.choice([0, 1, 2**63, 10**15, len(data), len(data) - 7, 2**64 - 1])
    data[:8] = length.to_bytes(8, "little")
    path.write_bytes(data)
    damage.sealed()


def sparse_file(damage):
    """A file of 10^13 bytes that takes no space on the disk."""
    rank = damage.chance.randrange(len(damage.files))
    os.truncate(damage.files[rank], 10**13)
    damage.document["files"][rank]["size"] = 10**13
    damage.seal_manifest()


def other_manifest(damage):
    document = damage.document
    changes = [
        lambda: document.update(format=1),
        lambda: document.update(format=3),
        lambda: document.update(format=10**15),
        lambda: document.update(format="2"),
        lambda: document.update(step=-1),
        lambda: document.update(step="12"),
        lambda: document.update(step=1e300),
        lambda: document.update(token="../../../tmp/xx"),
        lambda: document.update(token="f" * 16),
        lambda: document.update(token=None),
        lambda: document.update(strategy="Mean()"),
        lambda: document.update(strategy=["Mean()"]),
        lambda: document.update(world=10**6),
        lambda: document.update(files=[]),
        lambda: document.update(files={}),
        lambda: document["files"][0].update(name="../../etc/passwd"),
        lambda: document["files"][0].update(size=10**15),
        lambda: document["files"][0].update(sha256="0" * 64),
        lambda: document["parameters"].pop(),
        lambda: document["parameters"][0].__setitem__(1, [10**15]),
        lambda: document["parameters"][0].__setitem__(0, "renamed"),
        lambda: document.update(parameters=3),
        lambda: document.update(layout=[["no.such.parameter"]]),
        lambda: document.update(layout=[[3]]),
        lambda: document.update(layout=[[document["parameters"][0][0]]] * 2),
        lambda: document.pop("layout"),
        lambda: document.update(more="of a later version"),
    ]  # fmt: skip
    damage.chance.choice(changes)()
    damage.seal_manifest()


def fewer_ranks(damage):
    """As if one rank had saved: its file has the name that belongs to that, and says it is one of two."""
    document = damage.document
    name = file_name(0, 1, document["token"])
    shutil.copy(damage.files[0], damage.folder / name)
    document["files"] = [{**document["files"][0], "name": name}]
    document["world"] = 1
    damage.seal_manifest()


MUTATIONS = (
    bit_flip, bit_flip, bit_flip, truncated, longer, random_bytes, zeros, missing, folder_instead, exchanged,
    pickled, pickled, huge_shape, other_shape, bad_shape, other_offsets, other_dtype, not_finite, not_finite,
    other_name, other_value, other_document, other_header, no_metadata, other_head, header_length,
    sparse_file, other_manifest, other_manifest, fewer_ranks,
)  # fmt: skip


def damaged(source, target, seed, touched):
    """Copy a checkpoint and damage it; the name of the damage."""
    chance = random.Random(seed)
    shutil.copytree(source, target)
    mutation = MUTATIONS[seed % len(MUTATIONS)]
    mutation(Damage(target, chance, touched))
    return mutation.__name__
