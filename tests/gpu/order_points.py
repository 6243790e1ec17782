"""Every place in gradlane that orders streams or keeps memory for one, found in its source; and how to remove
one of them from the running program."""

import ast
import importlib
import inspect
from pathlib import Path
from typing import NamedTuple

import gradlane

SOURCE = Path(gradlane.__file__).parent
ORDERING = {"wait_stream", "wait_event", "record_stream", "record_event", "record", "synchronize", "wait"}
KEEPING = {"used_by_current_stream"}
ELSEWHERE = {  # no model on a device gets here
    "bench": "measures on the CPU",
    "cli": "starts other programs",
    "doctor": "asks the machine",
    "integrations": "calls what is tested",
    "local": "starts processes of the CPU",
    "report": "reads files",
    "train": "trains on the CPU",
}


class Point(NamedTuple):
    file: str
    function: str
    call: str

    def __str__(self):
        return f"{self.file} {self.function}: {self.call}"


def order_points():
    """All of them, in the order of files and lines."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if file.split("/")[0] not in ELSEWHERE:
            visitor = _Visitor(file)
            visitor.visit(ast.parse(path.read_text()))
            found += visitor.found
    return found


def is_order_point(node):
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        of_device = any(keyword.arg == "devices" for keyword in node.keywords)
        return node.func.id in KEEPING or (node.func.id == "Future" and of_device)
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in ORDERING:
        return False
    if node.func.attr != "wait":
        return True
    of = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
    return not node.args and of not in ("self", "step", "_step")  # those are of the host, and drain the lane


class _Visitor(ast.NodeVisitor):
    def __init__(self, file):
        self.file, self.found, self._path = file, [], []

    def _inside(self, node):
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _inside

    def visit_Call(self, node):
        if is_order_point(node):
            self.found.append(Point(self.file, ".".join(self._path), ast.unparse(node)))
        self.generic_visit(node)


class _Removal(ast.NodeTransformer):
    def __init__(self, call):
        self.call, self.count = call, 0

    def _is_meant(self, node):
        return is_order_point(node) and ast.unparse(node) == self.call

    def visit_Expr(self, node):
        if not self._is_meant(node.value):
            return self.generic_visit(node)
        self.count += 1
        function = node.value.func
        if getattr(function, "attr", "") == "wait" and isinstance(function.value, ast.Call):
            return ast.Expr(function.value)  # the collective stays
        return ast.Pass()

    def visit_Call(self, node):
        self.generic_visit(node)
        if not self._is_meant(node):
            return node
        self.count += 1
        if isinstance(node.func, ast.Name):  # a future without devices
            return ast.Call(node.func, [], [])
        return ast.Call(ast.Attribute(node.func.value, "value", ast.Load()), [], [])


def remove(point):
    """Run the function without the call from now on, in this process. A value that is waited for is read at
    once."""
    path = SOURCE / point.file
    tree, removal = ast.parse(path.read_text()), _Removal(point.call)
    names = point.function.split(".")
    node = tree
    for name in names:
        node = next(n for n in ast.walk(node) if getattr(n, "name", None) == name and n is not node)
    removal.visit(node)
    assert removal.count == 1, f"{point} is there {removal.count} times"
    code = compile(ast.fix_missing_locations(tree), str(path), "exec")
    found = importlib.import_module(f"gradlane.{point.file.removesuffix('.py').replace('/', '.')}")
    for name in names:
        if name in getattr(found, "__dict__", {}) or not inspect.isfunction(found):
            found = inspect.unwrap(found.__dict__[name])
        code = next(c for c in code.co_consts if inspect.iscode(c) and c.co_name == name)
    found.__code__ = code
