"""Default corpus: the functions and classes of the Python standard library, one document each.

    def quote(s):                  one document: a function with its docstring
    class Lock: ...                one document: a small class
    class Parser: def feed ...     a document for each method of a large class

Lengths are natural, from 10 to about 2,000 tokens, so packs have much to fill; the few functions of
more than 40 lines are left out. Code is written in one style, with the first line of its docstrings
and without comments: a small model can learn it in minutes. The tokenizer is a byte-level BPE
trained on this corpus. It and the encoded documents are cached in the user's cache folder under a
hash of the corpus, so a second run starts at once.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 2048
MAX_LINES, MAX_CLASS_LINES, MAX_PROMPT_CHARS = 40, 30, 400
MIN_VISIBLE = 20
"""A shorter completion does not show whether a model knows Python."""
EOS = "<|endoftext|>"


def documents() -> list[str]:
    """Return the functions and classes of the library's top-level modules, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = (
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(root.glob("*.py"))
    )
    return list(dict.fromkeys(each for text in texts for each in definitions(text)))


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
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno
        if isinstance(node, ast.ClassDef) and num_lines > MAX_CLASS_LINES:
            nodes += node.body[::-1]
        elif (source := _source(node)).count("\n") <= MAX_LINES:
            yield source


def _source(node: ast.stmt) -> str:
    """Write code in one style, without comments; docstrings keep their first line."""
    for each in ast.walk(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if lines := (ast.get_docstring(each) or "").strip().splitlines():
            each.body[0] = ast.Expr(ast.Constant(lines[0]))
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


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the training documents, and every fiftieth document, which is held out."""
    return [t for i, t in enumerate(texts) if i % 50], texts[::50]


def tokenizer(texts: list[str]):
    """Load the corpus's tokenizer from the cache, or train it."""
    from transformers import PreTrainedTokenizerFast

    path = _cached(texts, ".json", lambda unfinished: _train(texts).save(str(unfinished)))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=EOS, bos_token=EOS)


def encoded(texts: list[str]) -> list[np.ndarray]:
    """Load the documents' token ids from the cache, or encode them; each ends with EOS."""

    def write(unfinished: Path) -> None:
        eos_token_id = tokenizer(texts).eos_token_id
        rows = [[*ids, eos_token_id] for ids in tokenizer(texts)(texts)["input_ids"]]
        ends = np.cumsum([len(row) for row in rows])
        with unfinished.open("wb") as file:
            np.savez(file, ids=np.concatenate(rows).astype(np.uint16), ends=ends)

    with np.load(_cached(texts, ".npz", write)) as stored:
        return np.split(stored["ids"].astype(np.int64), stored["ends"][:-1])


def _cached(texts: list[str], suffix: str, write: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256("\0".join([str(VOCAB_SIZE), *texts]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nopad"
    path = cache / f"stdlib-{digest}{suffix}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f"{suffix}.{os.getpid()}")  # ranks may race: one rename wins
        write(unfinished)
        unfinished.replace(path)
    return path


def _train(texts: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe
