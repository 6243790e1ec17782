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
    calls += (
        "dist.broadcast",
        "dist.reduce",
        "dist.all_",
        "dist.gather",
        "dist.scatter",
        "reduce_scatter_base(",
    )
    found = {place(path) for path in SOURCE.rglob("*.py") if any(call in path.read_text() for call in calls)}
    # one_rank answers them, for a rank alone; the private name of one is in torch_internals
    # fsdp_comms answers FSDP's, by a strategy
    answering = {"lane/one_rank.py", "feed/fsdp_comms.py"}
    assert found == {"lane/perform.py", "torch_internals.py"} | answering


def test_the_report_page_needs_no_torch():
    pages = list((SOURCE / "report").rglob("*.py"))
    assert pages
    assert not [name for path in pages for name in imported(path) if name.split(".")[0] == "torch"]


NOT_TORCHS = {"_replace", "_asdict", "_exit", "_current_frames"}  # of named tuples, os and sys


def private_names(tree):
    """Attributes that begin with an underscore, also those that getattr and vars look up by a string."""
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or (isinstance(node, ast.Constant) and node.value)
        if isinstance(name, str) and name.startswith("_") and name[1:2].isalpha() and name.isidentifier():
            yield name


def own_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_private_names_of_torch_are_in_two_files_only():
    trees = {place(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    listed = set(private_names(trees.pop("torch_internals.py")))
    listed |= set(private_names(trees.pop("fsdp_internals.py")))
    assert {"_current_graph_task_id", "_orig_mod", "_pre_forward", "_rebuild_buckets"} <= listed
    ours = {name for tree in trees.values() for name in own_names(tree)} | NOT_TORCHS
    for path, tree in trees.items():
        assert not (found := listed & set(private_names(tree))), (path, found)
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        unknown = {name for name in attributes - ours if name[0] == "_" and name[1] != "_"}
        assert not unknown or path.startswith("integrations/"), (path, unknown)  # their frameworks' own
        text = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        modules = [*imported(SOURCE / path), *(value for value in text if isinstance(value, str))]
        assert not [name for name in modules if name.startswith("torch._")], path


def test_messages_name_no_file_of_the_documentation():
    """An installed package has none. Docstrings may, and the one of a file does not get to a user."""
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = [
            node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
        ]
        docstrings = {id(body[0].value) for body in own}
        texts = [
            node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings
        ]
        assert not [n.value for n in texts if isinstance(n.value, str) and "docs/" in n.value], path


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
IMPORTS = """
import sys, time
began = time.process_time()
import torch
before, torch_seconds, began = set(sys.modules), time.process_time() - began, time.process_time()
import gradlane
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(((time.process_time() - began) / torch_seconds, added))
"""


def test_import_is_light():
    """Beside torch's own import it takes little time, and it needs torch, numpy and safetensors only."""
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def imported_once():
        command = [sys.executable, "-c", IMPORTS]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout)

    imported_once()  # as installed: all modules are compiled
    for _ in range(3):  # a machine that is busy with other things may be slow for a while
        share, modules = imported_once()
        if share < 0.35:
            break
    added = set(modules) - {"gradlane", "torch", "_remote_module_non_scriptable"}
    assert added <= {*sys.stdlib_module_names, "numpy", "safetensors"}
    assert share < 0.35


def test_every_public_name_is_imported_and_listed():
    init = SOURCE / "__init__.py"
    imports = {name.rpartition(".")[2] for name in imported(init)} - {"functional"}
    assert imports == set(gradlane.__all__)
    assert all(getattr(gradlane, name) is not None for name in gradlane.__all__)
