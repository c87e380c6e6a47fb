"""Default corpus: the functions and classes of the Python standard library, one document each.

    def quote(s):                  one document: a function with its docstring
    class Lock: ...                one document: a small class
    class Parser: def feed ...     a document for each method of a large class

Lengths are natural, from 10 to about 2,000 tokens. Code is written in one style, with the first
line of its docstrings and without comments: a small model can learn it in minutes.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB_SIZE, MAX_EXAMPLES = 2048, 96
MAX_LINES, MAX_CLASS_LINES, MAX_PROMPT_CHARS = 40, 30, 400
MIN_VISIBLE = 20  # a shorter completion does not show whether a model knows Python
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def documents() -> tuple[list[str], list]:
    """Return the documents to train on, and examples of every fiftieth one, which is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_text("utf-8", "replace") for path in sorted(root.glob("*.py"))]
    texts = list(dict.fromkeys(each for file in files for each in definitions(file)))
    examples = [example for example in map(function_example, texts[::50]) if example]
    return [text for number, text in enumerate(texts) if number % 50], examples[:MAX_EXAMPLES]


def definitions(text: str) -> Iterator[str]:
    """Yield the source of functions and small classes, and of the methods of large classes.

    >>> list(definitions("x = 1\\nclass A:\\n    def f(self):  # one\\n        return(1)\\n"))
    ['class A:\\n\\n    def f(self):\\n        return 1\\n']
    """
    try:
        nodes: list[ast.stmt] = _parse(text).body[::-1]
    except (SyntaxError, ValueError):  # a file of the library may be made for another Python
        return
    while nodes:
        node = nodes.pop()
        if not isinstance(node, DEFINITIONS):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno
        if isinstance(node, ast.ClassDef) and num_lines > MAX_CLASS_LINES:
            nodes += node.body[::-1]
        elif (source := _source(node)).count("\n") <= MAX_LINES:
            yield source


def _source(node: ast.stmt) -> str:
    """Write code in one style, without comments; docstrings keep their first line."""
    for each in ast.walk(node):
        if isinstance(each, DEFINITIONS) and (doc := (ast.get_docstring(each) or "").strip()):
            each.body[0] = ast.Expr(ast.Constant(doc.splitlines()[0]))
    return ast.unparse(ast.fix_missing_locations(node)) + "\n"


def function_example(text: str) -> Any:
    """Split a function into an Example: signature and docstring, and its body; None for a class.

    The prompt ends before the line break, which is one token with the spaces of the next line.

    >>> function_example("def f(x):\\n    'Add one.'\\n    return x + 1\\n")
    Example(prompt="def f(x):\\n    'Add one.'", reference='\\n    return x + 1\\n')
    """
    from nopad.trainer.evaluation import Example

    (node,) = _parse(text).body
    if not isinstance(node, ast.FunctionDef):
        return None
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or body[0].lineno == node.lineno:
        return None
    prompt = "".join(text.splitlines(keepends=True)[: body[0].lineno - 1]).rstrip("\n")
    return Example(prompt, text[len(prompt) :]) if len(prompt) <= MAX_PROMPT_CHARS else None


def parses(text: str, reference: object = None) -> float:
    """Return 1 if a completion of a function's body, cut at its last full line, is Python.

    A completion of fewer than 20 visible characters counts as 0.

    >>> parses("\\n    return self.position + offset\\n    if se"), parses("\\n    return 1\\n")
    (1.0, 0.0)
    """
    block = text[: text.rfind("\n") + 1]
    if sum(not character.isspace() for character in block) < MIN_VISIBLE:
        return 0.0
    try:
        _parse(f"def function():{block}")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return 1.0


def _parse(text: str) -> ast.Module:
    """Parse without warnings about odd escapes in strings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE in a second; it is the same for the same texts."""
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer().train_new_from_iterator(texts, VOCAB_SIZE, show_progress=False)
