"""What the layers promise beyond what import-linter can see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradlane"
PURE = [
    path
    for part in ("core", "kernels", "codecs", "aggregate", "strategies", "simulate")
    for path in (SOURCE / part).glob("*.py")
]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_strategies_never_touch_torch_distributed(path):
    assert not [name for name in imported(path) if name.startswith("torch.distributed")]


@pytest.mark.parametrize(
    "name", ["ddp.py", *(f"compat/{path.name}" for path in (SOURCE / "compat").glob("*.py"))]
)
def test_hook_modules_keep_live_annotations(name):
    assert "__future__.annotations" not in imported(SOURCE / name)


def test_collectives_are_called_in_one_file_only():
    calls = ("allreduce(", "allgather(", "alltoall", ".all_reduce(", ".send([", ".recv([")
    found = {path.name for path in SOURCE.rglob("*.py") if any(call in path.read_text() for call in calls)}
    assert found == {"perform.py"}


def test_the_report_page_needs_no_torch():
    pages = list((SOURCE / "page").glob("*.py"))
    assert pages
    assert not [name for path in pages for name in imported(path) if name.split(".")[0] == "torch"]


def test_import_is_light():
    code = (
        "import sys, torch, torch.distributed, numpy; before = set(sys.modules); import gradlane;"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = set(ast.literal_eval(done.stdout)) - {"gradlane", "torch", "_remote_module_non_scriptable"}
    assert added <= set(sys.stdlib_module_names)
