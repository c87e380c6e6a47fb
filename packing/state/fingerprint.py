"""Identify data and settings by a short text, so that a state resumes only what it was made with.

Up to 64 MB are hashed completely; larger data by its size and 256 evenly spaced pieces, which the
files of a set share. A change outside these pieces that keeps all lengths is not detected. A
function's rows are identified by the first one, a streaming dataset's by the first four: later
rows may not exist yet, or raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from ..sample import Sample

FULL_HASH_LIMIT = 64 << 20
"""Bytes up to which data is hashed completely."""
NUM_PIECES, PIECE_BYTES = 256, 64 << 10
READ_BYTES = 4 << 20
"""Bytes read at a time if all are hashed."""
SCALAR_TYPES = {int, float, bool, str, bytes, type(None)}
"""Types whose `repr` identifies the value."""


class Fingerprint:
    """A hash that is updated piece by piece.

    >>> Fingerprint("a", 1).text() == Fingerprint("a", 1).text() != Fingerprint("a", 2).text()
    True
    """

    def __init__(self, *parts: Any):
        self._hash = hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12)

    def array(self, values: Any, dtype: np.dtype | None = None) -> Fingerprint:
        """Add an array, in memory or of a class that reads `pieces` from elsewhere.

        dtype: the dtype to hash the values in, whatever dtype they are stored in.
        """
        if values is None:
            return self
        dtype = np.dtype(values.dtype if dtype is None else dtype)
        self._hash.update(f"{dtype.str}{values.shape}".encode())
        num_entries = values.nbytes // values.itemsize
        ranges = content_ranges(num_entries * dtype.itemsize, num_entries)
        if isinstance(values, np.ndarray):
            flat = values.reshape(-1)
            pieces = (flat[begin:end] for begin, end in ranges)
        else:
            pieces = values.pieces(ranges)
        for piece in pieces:
            self._hash.update(np.ascontiguousarray(piece, dtype).data)
        return self

    def data(self, text: str) -> Fingerprint:
        """Add some text."""
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        return self

    def row(self, value: Any) -> Fingerprint:
        """Add a row of any type, with every entry of the arrays in it."""
        if isinstance(value, Sample):
            tokens = self.array(value.tokens).array(value.labels)
            tokens = tokens if value.target is None else tokens.row(value.target)
            return tokens if value.images is None else tokens.data(value.images.fingerprint())
        if isinstance(value, Mapping):
            return self.row([part for pair in value.items() for part in pair])
        if isinstance(value, list | tuple) and not SCALAR_TYPES.issuperset(map(type, value)):
            self.data(f"{type(value).__name__}{len(value)}")
            for part in value:
                self.row(part)
            return self
        if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
            return self.data(repr(value))
        try:
            array = np.asarray(value)
        except TypeError:  # a type that numpy lacks, such as a bfloat16 tensor
            return self.row(getattr(value, "tolist", value.__repr__)())
        return self.row(array.tolist()) if array.dtype == object else self.array(array)

    def file(self, size: int, pieces: Iterable[bytes]) -> Fingerprint:
        """Add a file's size and pieces of its content."""
        self._hash.update(str(size).encode())
        for piece in pieces:
            self._hash.update(piece)
        return self

    def text(self) -> str:
        """Return the fingerprint."""
        return self._hash.hexdigest()


def content_ranges(
    num_bytes: int, num_entries: int, total: int | None = None, pieces: int = NUM_PIECES
) -> list[tuple[int, int]]:
    """Return the ranges of entries to hash: all, or evenly spaced pieces with both ends.

    total: bytes of all data that this is a part of.
    """
    entry_bytes = max(1, num_bytes // max(1, num_entries))
    if (num_bytes if total is None else total) <= FULL_HASH_LIMIT:
        step = max(1, READ_BYTES // entry_bytes)
        starts = range(0, num_entries, step)
    else:
        step = max(1, PIECE_BYTES // entry_bytes)
        starts = np.linspace(0, max(0, num_entries - step), pieces).astype(int).tolist()
    return [(start, min(start + step, num_entries)) for start in starts]


def processor_settings(processor: Any) -> dict[str, str]:
    """Identify how a processor makes tokens and pixels, as an entry of settings; {} without one."""
    names = {} if processor is None else {"processor": processor}
    return {name: Fingerprint(each.to_json_string()).text() for name, each in names.items()}


def tokenizer_fingerprint(tokenizer: Any, template: bool = True) -> str | None:
    """Identify a tokenizer by its vocabulary, special tokens, chat template and a test text.

    template: False leaves out the chat template, which plain text does not depend on.
    """
    if tokenizer is None:
        return None
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    names = ("chat_template", "eos_token_id", "bos_token_id")[not template :]
    special = [str(getattr(tokenizer, name, None)) for name in names]
    return Fingerprint(vocabulary, _encode_test_text(tokenizer), special).text()


def template_fingerprint(tokenizer: Any) -> str | None:
    """Identify a tokenizer's chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else Fingerprint(str(template)).text()


def package_version(name: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _encode_test_text(tokenizer: Any) -> list[int] | None:
    """Encode a line with many kinds of characters; None if the tokenizer cannot encode it."""
    try:
        ids = tokenizer("The 2 quick\tfoxes — naïve 日本\n\n  x1=3.14 'don't'")
    except Exception:  # a tokenizer may raise anything on unknown characters
        return None
    return [int(i) for i in (ids["input_ids"] if hasattr(ids, "keys") else ids)]
