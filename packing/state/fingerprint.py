"""Identify data and settings by a short text, so that a state meets only what it was made with.

Up to 64 MB are hashed whole; of more, the size and 256 pieces spread evenly. A change that touches
none of these pieces and no length is not seen. A function's rows are known by the first, a
streaming dataset's by four: more of them may not be there yet, or may raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..sample import Sample

WHOLE = 64 << 20
PIECES, PIECE = 256, 64 << 10
PLAIN = {int, float, bool, str, bytes, type(None)}
"""What is told whole by its `repr`."""


class Fingerprint:
    """A hash that is fed piece by piece.

    >>> Fingerprint("a", 1).text() == Fingerprint("a", 1).text() != Fingerprint("a", 2).text()
    True
    """

    def __init__(self, *parts: Any):
        self._hash = hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12)

    def array(self, values: np.ndarray | None) -> Fingerprint:
        """Take in an array."""
        if values is None:
            return self
        self._hash.update(f"{values.dtype.str}{values.shape}".encode())
        flat = values.reshape(-1)
        step = max(1, PIECE // values.itemsize)
        for begin in _pieces(values.nbytes, len(flat), step):
            self._hash.update(np.ascontiguousarray(flat[begin : begin + step]).data)
        return self

    def data(self, text: str) -> Fingerprint:
        """Take in some text."""
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        return self

    def row(self, value: Any) -> Fingerprint:
        """Take in a row of any make, with every entry of the arrays in it."""
        if isinstance(value, Sample):
            return self.array(value.tokens).array(value.labels)
        if isinstance(value, Mapping):
            return self.row([part for pair in value.items() for part in pair])
        if isinstance(value, list | tuple) and not PLAIN.issuperset(map(type, value)):
            self.data(f"{type(value).__name__}{len(value)}")
            for part in value:
                self.row(part)
            return self
        if not hasattr(value, "__array__"):
            return self.data(repr(value))
        try:
            array = np.asarray(value)
        except TypeError:  # numpy has no such numbers, as of a tensor in bfloat16
            return self.row(getattr(value, "tolist", value.__repr__)())
        return self.row(array.tolist()) if array.dtype == object else self.array(array)

    def file(self, path: Path, size: int | None = None) -> Fingerprint:
        """Take in a file's size and content, not its name or date: copies are the same data.

        size: as much of it as counts; what was appended since does not.
        """
        size = path.stat().st_size if size is None else size
        self._hash.update(str(size).encode())
        with path.open("rb") as file:
            for begin in _pieces(size, size, PIECE):
                file.seek(begin)
                self._hash.update(file.read(min(PIECE, size - begin)))
        return self

    def text(self) -> str:
        """Give the fingerprint."""
        return self._hash.hexdigest()


def _pieces(size: int, entries: int, step: int) -> range | list[int]:
    """Where the pieces to be hashed begin: all of them, or an even spread with both ends."""
    if size <= WHOLE:
        return range(0, entries, step)
    return [int(at) for at in np.linspace(0, max(0, entries - step), PIECES)]


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Identify a tokenizer by its vocabulary, its special tokens, its template and a probe."""
    if tokenizer is None:
        return None
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    names = ("chat_template", "eos_token_id", "bos_token_id")
    special = [str(getattr(tokenizer, name, None)) for name in names]
    return Fingerprint(vocabulary, _probe(tokenizer), special).text()


def _probe(tokenizer: Any) -> list[int] | None:
    """Encode a line with a little of everything; None for a tokenizer of few letters."""
    try:
        ids = tokenizer("The 2 quick\tfoxes — naïve 日本\n\n  x1=3.14 'don't'")
    except Exception:  # a tokenizer may raise anything on what it does not know
        return None
    return [int(i) for i in (ids["input_ids"] if hasattr(ids, "keys") else ids)]
