"""What outlives a call in the process is listed in CONTRIBUTING.md, each with its reason.

Found in the sources: names that functions rebind (`global`) or module-level containers they
change, caches, context variables, what is assigned into other modules, and process-wide hooks
(signals, fork, exit, environment variables, registrations).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "runtime", "kernels", "packing", "attention", "collators", "trainer", "inference", "cli",
    "recipes",
)  # fmt: skip
CONTAINERS = {"dict", "list", "set", "deque", "Counter", "defaultdict", "WeakKeyDictionary",
              "WeakValueDictionary", "WeakSet", "WeakIdKeyDictionary",
              "WeakTensorKeyDictionary", "local"}  # fmt: skip
CHANGES = {"append", "add", "update", "pop", "popitem", "clear", "setdefault", "remove", "extend"}
CACHES = {"cache", "lru_cache", "functools.cache", "functools.lru_cache"}
HOOKS = {
    "signal.signal", "signal.set_wakeup_fd", "os.register_at_fork", "atexit.register",
    "faulthandler.enable", "AttentionInterface.register", "AttentionMaskInterface.register",
    "register_model", "gc.disable", "gc.enable", "gc.set_threshold", "gc.freeze", "os.putenv",
    "register_optimizer_step_post_hook",
}  # fmt: skip


def process_state(source: str) -> set[str]:
    """Names of everything in a module that outlives a call."""
    tree = ast.parse(source)
    found = set()
    imported = _imported(tree)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    containers = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_container(node.value)
        for name in _names(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(ast.unparse(d).split("(")[0] in CACHES for d in node.decorator_list):
                found.add(node.name)
            found |= _changed(node) & containers
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in HOOKS:
                found.add(called)
            if (
                called == "setattr"
                and node.args
                and ast.unparse(node.args[0]).split(".")[0] in imported
            ):
                found.add(f"setattr {ast.unparse(node.args[0])}")
        found |= _assigned_into(node, imported | classes)
    for node in tree.body:
        assigned = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(assigned, ast.Call) and ast.unparse(assigned.func).endswith("ContextVar"):
            found |= _names(node)
    return found


def _imported(tree: ast.AST) -> set[str]:
    """Names that import statements bind, at any level."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1].split("[")[0] in CONTAINERS
    return isinstance(value, ast.Dict | ast.List | ast.Set)


def _names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _changed(function: ast.AST) -> set[str]:
    """Names whose contents a function changes."""
    changed = set()
    for node in ast.walk(function):
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in CHANGES:
            changed.add(ast.unparse(method.value))
        for target in _targets(node):
            if isinstance(target, ast.Subscript):
                changed.add(ast.unparse(target.value))
    return changed


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _assigned_into(node: ast.AST, owners: set[str]) -> set[str]:
    """`module.name = …`, `Class.name = …` and `os.environ[…] = …`."""
    found = set()
    for target in _targets(node):
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
            found.add("os.environ")
        if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[0] in owners:
            found.add(ast.unparse(target))
    return found


def listed() -> set[tuple[str, str]]:
    """(file, name) of every row in CONTRIBUTING.md's table of process-wide state."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \| .+ \|$", text, re.MULTILINE)
    return {(file, name) for file, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_process_wide_state_is_listed_with_its_reason():
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in process_state(path.read_text())
    }
    assert found == listed()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    global x\n    x = 1", "x"),
        ("kept = {}\ndef f(a):\n    kept[a] = 1", "kept"),
        ("kept: list[int] = []\ndef f(a):\n    kept.append(a)", "kept"),
        ("from functools import cache\n@cache\ndef f(): ...", "f"),
        ("from contextvars import ContextVar\nx = ContextVar('x')", "x"),
        ("import torch\ntorch.add = None", "torch.add"),
        ("class A:\n    n = 0\ndef f():\n    A.n += 1", "A.n"),
        ("import os\ndef f():\n    os.environ['A'] = '1'", "os.environ"),
        ("import signal\ndef f():\n    signal.signal(2, None)", "signal.signal"),
    ],
)
def test_the_reader_sees_each_form_of_it(source, name):
    assert process_state(source) == {name}
