"""What the layers promise beyond what import-linter can see."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradlane

SOURCE = Path(__file__).parents[2] / "src" / "gradlane"
PURE = [
    path
    for part in ("core", "kernels", "codecs", "aggregate", "strategies", "simulate")
    for path in (SOURCE / part).rglob("*.py")
]


def place(path):
    return str(path.relative_to(SOURCE))


def test_packages_inside_of_packages_are_looked_at():
    assert {"strategies/mean.py", "strategies/lowrank/iteration.py"} <= set(map(place, PURE))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", PURE, ids=place)
def test_strategies_never_touch_torch_distributed(path):
    assert not [name for name in imported(path) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("name", ["ddp.py", *(place(path) for path in (SOURCE / "compat").rglob("*.py"))])
def test_hook_modules_keep_live_annotations(name):
    assert "__future__.annotations" not in imported(SOURCE / name)


def test_collectives_are_called_in_one_file_only():
    calls = ("allreduce(", "allgather(", "alltoall", ".all_reduce(", ".send([", ".recv([", "barrier(")
    calls += ("dist.broadcast", "dist.reduce", "dist.all_", "dist.gather", "dist.scatter", "reduce_scatter")
    found = {place(path) for path in SOURCE.rglob("*.py") if any(call in path.read_text() for call in calls)}
    assert found == {"lane/perform.py", "lane/one_rank.py"}  # the second answers them, for a rank alone


def test_the_report_page_needs_no_torch():
    pages = list((SOURCE / "report").rglob("*.py"))
    assert pages
    assert not [name for path in pages for name in imported(path) if name.split(".")[0] == "torch"]


BEYOND_TORCH = """
import sys, time, torch
before, began = set(sys.modules), time.process_time()
import gradlane
print((time.process_time() - began, sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_import_is_light(tmp_path):
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # as installed: compiled once
    environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def imported_once():
        command = [sys.executable, "-c", BEYOND_TORCH]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout)

    imported_once()
    for _ in range(3):  # a machine that is busy with other things may be slow for a while
        seconds, modules = imported_once()
        if seconds < 0.05:
            break
    added = set(modules) - {"gradlane", "torch", "_remote_module_non_scriptable"}
    assert added <= set(sys.stdlib_module_names)
    assert seconds < 0.05


def test_type_checkers_are_told_of_the_names_that_there_are():
    stub = SOURCE / "__init__.pyi"
    named = {name.rpartition(".")[2] for name in imported(stub)}
    (listed,) = [node.value for node in ast.parse(stub.read_text()).body if isinstance(node, ast.Assign)]
    assert named == set(ast.literal_eval(listed)) == set(gradlane.__all__)
    assert all(getattr(gradlane, name) is not None for name in gradlane.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Meen'"):
        gradlane.Meen  # noqa: B018
