"""Tokens on disk, so that the same data is tokenized once.

    key   all bytes of the data, the tokenizer with its template, settings, versions, this code
    entry FOLDER/KEY/  tokens.bin  lengths.bin  labels.bin?  entry.json (sizes, checksums, skipped)

An entry is written under a temporary name and then renamed, so that a process sees all of it or
nothing. If two processes write the same entry, one wins. A damaged entry is encoded again. Data or
tokenizers that cannot be identified completely (functions, iterables, slow tokenizers) are not
cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..sources.source import RowSource
from ..sources.token_store import TokenArray
from .encoder import Encoder, encode_source
from .report import SkippedRows

log = logging.getLogger(__name__)
ENTRY = "entry.json"
TOKENIZER_SETTINGS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "add_eos_token",
    "split_special_tokens", "special_tokens_map",
)  # fmt: skip
"""Attributes that, besides the backend and the chat template, determine a tokenizer's output."""
MIN_BYTES = 4 << 20
"""Smaller data is tokenized in a second or two, and not cached by default."""


class TokenCache:
    """Entries in one folder; `messages` says what was read or written."""

    def __init__(self, folder: Path, min_bytes: int = 0):
        self.folder, self.min_bytes = folder, min_bytes
        self.messages: list[str] = []

    @classmethod
    def of(cls, cache_dir: Any) -> TokenCache | None:
        """Return the cache in a folder; None means the default folder, False no cache."""
        if cache_dir is False:
            return None
        if cache_dir is None:
            return cls(default_folder(), MIN_BYTES)
        if not isinstance(cache_dir, str | os.PathLike) or not os.fspath(cache_dir):
            raise ValueError(f"cache_dir={cache_dir!r}: pass a folder, or False for no cache")
        return cls(Path(os.path.expanduser(cache_dir)))

    def encode(
        self,
        source: RowSource,
        encoder: Encoder,
        skipped: SkippedRows | None,
        number: int,
        max_length: int | None,
    ) -> TokenArray:
        """Return the tokens of a source, from the cache if they are in it."""
        encode = partial(encode_source, source, encoder, number=number, max_length=max_length)
        if (source.num_bytes or 0) < self.min_bytes:
            return encode(skipped)
        key = entry_key(source, encoder, skipped is not None, max_length)
        if key is None:
            return encode(skipped)
        own = None if skipped is None else SkippedRows()
        array = self._read(key, source.name, number, own)
        if array is None:
            array = encode(own)
            self._write(key, array, own)
        if skipped is not None and own is not None:
            skipped.merge(own)
        return array

    def _read(
        self, key: str, name: str, number: int, skipped: SkippedRows | None
    ) -> TokenArray | None:
        place = self.folder / key
        if not place.is_dir():
            return None
        try:
            entry = json.loads((place / ENTRY).read_text(encoding="utf-8"))
            arrays = {part: _read_array(place, part, how) for part, how in entry["files"].items()}
            if skipped is not None:
                skipped.merge(SkippedRows(**entry["skipped"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(f"cached tokens in {place} are damaged ({error}): tokenizing again")
            shutil.rmtree(place, ignore_errors=True)
            return None
        self._say(f"tokens of {name} read from {place}")
        lengths = arrays["lengths"]
        begins = np.cumsum(lengths) - lengths
        labels = arrays.get("labels")
        return TokenArray(name, arrays["tokens"], begins, lengths, labels, number)

    def _write(self, key: str, array: TokenArray, skipped: SkippedRows | None) -> None:
        place = self.folder / key
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix="draft-", dir=self.folder))
            try:
                parts = {"tokens": array.flat, "lengths": array.lengths, "labels": array.labels}
                files = {n: _write_array(draft, n, a) for n, a in parts.items() if a is not None}
                counts = skipped or SkippedRows()
                skipped_rows = {"rows": counts.rows, "reasons": counts.reasons}
                (draft / ENTRY).write_text(json.dumps({"files": files, "skipped": skipped_rows}))
                os.rename(draft, place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)  # not there if it was renamed
        except OSError as error:
            if not (place / ENTRY).is_file():  # otherwise another process wrote the same
                self._say(f"tokens of {array.name} are not cached: {error}")
                return
        self._say(f"tokens of {array.name} cached in {place}")

    def _say(self, message: str) -> None:
        self.messages.append(message)
        log.info(message)


def default_folder() -> Path:
    """Return nopad's folder in the cache of Hugging Face."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hf_home = os.environ.get("HF_HOME", os.path.join(home, "huggingface"))
    return Path(os.path.expanduser(hf_home)) / "nopad" / "tokens"


def entry_key(
    source: RowSource, encoder: Encoder, skips: bool, max_length: int | None
) -> str | None:
    """Identify the tokens of a source; None if its rows or the tokenizer cannot be identified."""
    tokenizer = _tokenizer_text(encoder.tokenizer)
    if tokenizer is None or not encoder.format_is_named:
        return None
    rows = source.cache_key()
    if rows is None:
        return None
    settings = [encoder.text_column, encoder.format_name, encoder.eos_token_id, encoder.vocab_size]
    versions = [_version(name) for name in ("nopad", "transformers", "tokenizers", "jinja2")]
    parts = [rows, tokenizer, settings, skips, max_length, versions, _code_hash()]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _tokenizer_text(tokenizer: Any) -> list[str] | None:
    """Return everything that determines a fast tokenizer's output; None for other tokenizers."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    is_stock = type(tokenizer).__module__.startswith("transformers.")
    if not is_stock or not getattr(tokenizer, "is_fast", False) or not hasattr(backend, "to_str"):
        return None
    template = str(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    special = [f"{name}={getattr(tokenizer, name, None)}" for name in TOKENIZER_SETTINGS]
    return [type(tokenizer).__name__, backend.to_str(), template, today, *special]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _code_hash() -> str:
    """Hash the code that turns rows into tokens: tokens of an older version are not read."""
    digest, packing = hashlib.blake2b(digest_size=16), Path(__file__).parents[1]
    for path in sorted([*packing.glob("*.py"), *packing.glob("encoding/*.py")]):
        digest.update(path.read_bytes())
    for path in sorted(packing.glob("sources/**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_array(folder: Path, name: str, values: np.ndarray) -> dict:
    """Write an array in the smallest of three types; return what is needed to read it."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    types: tuple[Any, ...] = (np.uint16, np.int32, np.int64)
    dtype = next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    data = values.astype(dtype).tobytes()
    (folder / f"{name}.bin").write_bytes(data)
    return {"dtype": np.dtype(dtype).str, "bytes": len(data), "blake2b": _checksum(data)}


def _read_array(folder: Path, name: str, how: dict) -> np.ndarray:
    data = (folder / f"{name}.bin").read_bytes()
    if len(data) != how["bytes"] or _checksum(data) != how["blake2b"]:
        raise ValueError(f"{name}.bin differs from what was written")
    return np.frombuffer(data, np.dtype(how["dtype"])).astype(np.int64)


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
