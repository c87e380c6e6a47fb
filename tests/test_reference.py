"""Everything public is in the API reference, and every argument of it is explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nopad import PackedTrainerMixin
from transformers import Trainer

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
ENTRIES = sorted(
    entry
    for page in REFERENCE.glob("*.md")
    for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
)
FACES = (
    "nopad",
    "nopad.collators",
    "nopad.inference",
    "nopad.inference.endpoint",
    "nopad.inference.harness",
    "nopad.trainer",
    "nopad.trainer.evaluation",
    "nopad.trainer.with_accelerate",
    "nopad.trainer.with_hf",
    "nopad.trainer.with_lightning",
    "nopad.trainer.with_trl",
)


def public_objects() -> Iterator[tuple[str, Any]]:
    """The classes and functions of the reference, each once."""
    seen: set[int] = set()
    for entry in ENTRIES:
        module, name = entry.rsplit(".", 1)
        value = getattr(importlib.import_module(module), name)
        if callable(value) and id(value) not in seen:
            seen.add(id(value))
            yield entry, value


@pytest.mark.parametrize("face", FACES)
def test_everything_public_is_in_the_reference(face):
    module = importlib.import_module(face)
    public = {name: getattr(module, name) for name in module.__all__}
    told = {id(value) for _, value in public_objects()}
    classes_and_functions = {name: value for name, value in public.items() if callable(value)}
    assert [name for name, value in classes_and_functions.items() if id(value) not in told] == []


def test_every_argument_is_explained():
    missing = [
        f"{entry}{method}({argument})"
        for entry, value in public_objects()
        for method, function, docs in documented_calls(value)
        for argument in unexplained(function, docs)
    ]
    assert missing == []


def documented_calls(value: Any) -> Iterator[tuple[str, Callable, str]]:
    """The callables of a public name, each with the docstrings that explain its arguments.

    The sentence of a method may name its arguments as words.
    """
    if not inspect.isclass(value):
        yield "", value, inspect.getdoc(value) or ""
        return
    own = [cls for cls in value.__mro__ if cls.__module__.startswith("nopad.")]
    inits = [vars(cls)["__init__"] for cls in own if "__init__" in vars(cls)]
    docs = [cls.__doc__ or "" for cls in own] + [init.__doc__ or "" for init in inits]
    yield "", value, "\n".join([*map(inspect.cleandoc, docs), *map(attribute_docs, own)])
    for name, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(function) or overrides(value, name):
            continue
        prose = re.findall(r"\w+", inspect.getdoc(function) or "")
        yield f".{name}", function, " ".join(f"`{word}`" for word in prose)


def overrides(cls: type, name: str) -> bool:
    """Whether a method is one of a base class, which explains its arguments."""
    bases = (*cls.__mro__[1:], *([Trainer] if cls is PackedTrainerMixin else []))
    return any(name in vars(base) for base in bases)


def attribute_docs(cls: type) -> str:
    """The fields of a dataclass that have a docstring, as entries of an Args section."""
    if not hasattr(cls, "__dataclass_fields__"):
        return ""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, tree.body[1:], strict=False)
    named = [
        before.target.id
        for before, after in pairs
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    ]
    return "\n".join(f"    {name}: see its docstring" for name in named)


def unexplained(function: Callable, docs: str) -> list[str]:
    """The arguments without an entry of an Args section; a sentence may name them in backticks.

    >>> def spread(width, *, depth): "Spread over a `width`."
    >>> unexplained(spread, spread.__doc__)
    ['depth']
    """
    names = [name for name in inspect.signature(function).parameters if not name.startswith("_")]
    names = [name for name in names if name not in ("self", "cls")]
    return [n for n in names if not re.search(rf"^ +{n}: \S|`{n}`", docs, re.MULTILINE)]
