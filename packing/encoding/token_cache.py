"""`TokenCache`: encoded sources on disk, keyed by data, tokenizer, settings and versions.

    key   all bytes of the data, the tokenizer with its template, settings, versions, this code
    entry FOLDER/KEY/, a corpus (`sources/corpus.py`)

If several processes need an entry, one writes it and the others wait. A damaged entry is encoded
again. Data or tokenizers that cannot be identified completely (functions, iterables, slow
tokenizers) are not cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

from ..sources.corpus import MANIFEST, find_damage, open_corpus
from ..sources.local_folder import LocalFolder
from ..sources.source import RowSource
from ..sources.token_store import TokenArray
from ..state.fingerprint import package_version
from .encoder import Encoder
from .report import SkippedRows
from .shard_job import Job, encode_source
from .tokenization import run_job

log = logging.getLogger(__name__)
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
    ) -> list[TokenArray]:
        """Return the tokens of a source, from the cache if they are in it."""
        key = None
        if (source.num_bytes or 0) >= self.min_bytes:
            key = entry_key(source, encoder, skipped is not None, max_length)
        if key is None:
            return [encode_source(source, encoder, skipped, number, max_length)]
        folder = LocalFolder(self.folder / key)
        if not self._is_intact(folder, source.name):
            skips = skipped is not None
            job = Job.of(source, encoder, folder, skips_errors=skips, max_length=max_length)
            try:
                run_job(job, wait=True)
            except OSError as error:
                self._say(f"tokens of {source.name} are not cached: {error}")
                return [encode_source(source, encoder, skipped, number, max_length)]
            except ValueError:  # a bad row: this entry can never be completed
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
            self._say(f"tokens of {source.name} cached in {folder}")
        return open_corpus(folder, number)

    def _is_intact(self, folder: LocalFolder, name: str) -> bool:
        """Return whether the cache has an entry; one that is damaged is removed."""
        if not folder.exists(MANIFEST):
            return False
        try:
            damaged = find_damage(folder)
        except (ValueError, KeyError, TypeError) as error:
            damaged = str(error)
        if damaged is not None:
            self._say(f"cached tokens in {folder} are damaged ({damaged}): tokenizing again")
            shutil.rmtree(folder.path, ignore_errors=True)
            return False
        self._say(f"tokens of {name} read from {folder}")
        return True

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
    versions = [package_version(name) for name in ("nopad", "transformers", "tokenizers", "jinja2")]
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


def _code_hash() -> str:
    """Hash the code that turns rows into tokens: tokens of an older version are not read."""
    digest, packing = hashlib.blake2b(digest_size=16), Path(__file__).parents[1]
    for path in sorted([*packing.glob("*.py"), *packing.glob("encoding/*.py")]):
        digest.update(path.read_bytes())
    for path in sorted(packing.glob("sources/**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
