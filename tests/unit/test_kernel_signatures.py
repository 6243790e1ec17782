"""The ctypes signatures are those of csrc/kernels.h: a difference would corrupt memory without a message."""

import ctypes
import re
from pathlib import Path

import pytest

from gradlane.kernels import library, native

HEADER = (Path(library.__file__).parent / "csrc" / "kernels.h").read_text(encoding="utf-8")
TYPES = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def prototypes(header):
    """{name: (argument types, result type)} of all exported functions."""
    code = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    found = re.findall(r"^EXPORT\s+(\w+)\s+gradlane_(\w+)\(([^)]*)\);", code, re.MULTILINE)
    assert len(found) == len(re.findall(r"^EXPORT\b", code, re.MULTILINE)), "a prototype is not understood"
    return {name: (arguments_of(arguments), TYPES[result]) for result, name, arguments in found}


def arguments_of(text):
    if text.strip() == "void":
        return ()
    return tuple(
        ctypes.c_void_p if "*" in argument else TYPES[argument.split()[0]] for argument in text.split(",")
    )


def differences(header):
    declared = prototypes(header)
    names = sorted({*declared, *library.SIGNATURES})
    return [name for name in names if declared.get(name) != library.SIGNATURES.get(name)]


def test_every_signature_is_that_of_the_header():
    assert differences(HEADER) == []


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("gram", "int rows, int64_t columns, double *gram", "int64_t rows, int64_t columns, double *gram"),
        ("divide", "float divisor, float limit", "double divisor, float limit"),
        ("expand", "int64_t r,\n                            float *out", "float *out"),
        ("topk_exact", "EXPORT int64_t gradlane_topk_exact", "EXPORT int gradlane_topk_exact"),
        ("orthonormalise", "gradlane_orthonormalise", "gradlane_orthogonalise"),
    ],
)  # fmt: skip
def test_a_changed_prototype_is_noticed(name, before, after):
    assert HEADER.count(before) == 1
    assert name in differences(HEADER.replace(before, after))


def test_the_version_is_that_of_the_header():
    assert re.findall(r"^#define GRADLANE_ABI (\d+)", HEADER, re.MULTILINE) == [str(library.ABI)]


@pytest.mark.skipif(not native.levels(), reason="the kernels are not compiled")
def test_the_library_exports_every_function():
    compiled, _ = native._library()
    assert all(hasattr(compiled, f"gradlane_{name}") for name in library.SIGNATURES)
