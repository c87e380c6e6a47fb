"""The corpus folder that `tokenize` writes: open its shards, read its manifest, find damage.

    FOLDER/  00000.bin 00000.idx 00000.mask?     the documents of a range of rows, as in Megatron
             00001.bin ...
             manifest.json                       written last: the folder is complete

    while it is written   job.json               what the shards are made of; the same if continued
                          00000.json             written after its shard: counts and checksums

A shard's files have their names only when all of them are complete, so a run that was killed
continues with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..sample import IGNORE_INDEX
from ..state.fingerprint import template_fingerprint, tokenizer_fingerprint
from .local_folder import Folder, LocalFolder
from .mapped_index import MappedBegins, SummedBegins
from .paths import DataFile
from .remote import RemoteFile, read_together
from .token_files import MASK, open_tokens, read_index, read_lengths
from .token_store import TokenArray, tokens_fingerprint

FORMAT = "nopad-tokens-1"
MANIFEST, JOB = "manifest.json", "job.json"
READ_BYTES = 1 << 20


def is_corpus(folder: Folder) -> bool:
    """Return whether a folder has a corpus, complete or not."""
    return any(_has_format(folder.read(name)) for name in (MANIFEST, JOB))


def _has_format(data: bytes | None) -> bool:
    return data is not None and FORMAT.encode() in data[:200]


def read_json(folder: Folder, name: str) -> dict | None:
    """Return the content of a JSON file; None if it does not exist or is not intact."""
    data = folder.read(name)
    try:
        value = None if data is None else json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(folder: Folder, name: str, value: dict) -> None:
    """Write a JSON file."""
    folder.write(name, (json.dumps(value, indent=1) + "\n").encode())


def shard_name(number: int) -> str:
    """Return the name of a shard, without suffix."""
    return f"{number:05}"


def read_manifest(folder: Folder) -> dict:
    """Return the manifest of a corpus; raise if it is not complete."""
    manifest = read_json(folder, MANIFEST)
    if manifest is None and folder.exists(MANIFEST):
        raise ValueError(f"{folder}/{MANIFEST} is corrupted: tokenize again into another folder")
    if manifest is None:
        raise ValueError(
            f"the tokens in {folder} are not complete: run the same `nopad tokenize` again, which "
            "continues"
        )
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder} has the format {manifest.get('format')}, expected {FORMAT}")
    return manifest


def open_corpus(folder: Folder, source: int = 0) -> list[TokenArray]:
    """Open a corpus, one token array per shard; `source` is its index in a mixture."""
    manifest = read_manifest(folder)
    shards, dtype, name = manifest["shards"], np.dtype(manifest["dtype"]), manifest["source"]
    arrays = open_shards(folder, shards, dtype, name, source, manifest)
    return arrays or [TokenArray.of([], name, source)]


def check_tokenizer(manifest: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise if a corpus was made with another tokenizer, or its chats with another template."""
    if tokenizer is None or manifest["tokenizer"] is None:
        return
    other = None
    if tokenizer_fingerprint(tokenizer, template=False) != manifest["tokenizer"]:
        other = "tokenizer"
    elif manifest["uses_template"] and template_fingerprint(tokenizer) != manifest["template"]:
        other = "chat template"
    if other is not None:
        raise ValueError(
            f"the tokens of {manifest['source']} were made with another {other} than the one "
            "passed: use the same, or tokenize again into another folder"
        )


def open_shards(
    folder: Folder,
    records: Sequence[Mapping],
    dtype: np.dtype,
    name: str,
    source: int = 0,
    manifest: Mapping | None = None,
) -> list[TokenArray]:
    """Open the shards that have documents."""
    shards = [(number, record) for number, record in enumerate(records) if record["documents"]]

    def open_one(shard: tuple[int, Mapping]) -> TokenArray:
        number, record = shard
        parts: dict[str, DataFile] = {}
        for suffix, (size, _) in record["files"].items():
            parts[suffix] = folder.file(shard_name(number) + suffix, size)
            _check_size(parts[suffix], size)
        if isinstance(parts[".idx"], RemoteFile):
            lengths = read_lengths(parts[".idx"], record["documents"])
            begins = SummedBegins(lengths)
        else:
            lengths, pointers = read_index(parts[".idx"])[1:3]
            begins = MappedBegins(pointers, dtype.itemsize)
        flat, file = open_tokens(parts[".bin"], dtype)
        mask = open_tokens(parts[MASK], np.dtype(bool))[0] if MASK in parts else None
        return TokenArray(name, flat, begins, lengths, mask, source, file, manifest)

    return list((map if isinstance(folder, LocalFolder) else read_together)(open_one, shards))


def _check_size(file: DataFile, size: int) -> None:
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        found = 0
    if found != size:
        raise ValueError(
            f"{file} has {found} bytes, it was written with {size}: it is truncated or changed; "
            "run the same `nopad tokenize` again, which replaces it"
        )


def find_damage(folder: Folder, advance: Callable[[int], None] = lambda size: None) -> str | None:
    """Compare a corpus with its checksums; return the name of a file that differs.

    advance: is called with the number of bytes that were read.
    """
    for number, record in enumerate(read_manifest(folder)["shards"]):
        for suffix, (size, checksum) in record["files"].items():
            file = folder.file(shard_name(number) + suffix, size)
            try:
                if _checksum(file) != [size, checksum]:
                    return file.name
            except OSError:
                return file.name
            advance(size)
    return None


def _checksum(file: DataFile) -> list:
    digest, size = hashlib.blake2b(digest_size=16), 0
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return [size, digest.hexdigest()]


def corpus_fingerprint(arrays: Sequence[TokenArray]) -> str:
    """Identify the documents of all shards: the same as if they were one array in memory."""
    lengths = _Joined(arrays, [len(a.lengths) for a in arrays], lambda a, s: a.lengths[s])
    sizes = [len(array.flat) for array in arrays]
    flat = _Joined(arrays, sizes, lambda array, some: array.flat[some])
    labels = _Joined(arrays, sizes, _labels) if any(a.labels is not None for a in arrays) else None
    return tokens_fingerprint(lengths, flat, labels)


class _Joined:
    """A column of several token arrays as one int64 array that is read in pieces."""

    dtype, itemsize = np.dtype(np.int64), 8

    def __init__(self, arrays: Sequence[TokenArray], sizes: Sequence[int], read: Any):
        self.arrays, self.read = arrays, read
        self.firsts = np.cumsum([0, *sizes]).tolist()
        self.shape, self.nbytes = (self.firsts[-1],), 8 * self.firsts[-1]

    def __len__(self) -> int:
        return self.shape[0]

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        for begin, end in ranges:
            parts = [np.zeros(0, np.int64)]
            for array, (first, last) in zip(self.arrays, pairwise(self.firsts), strict=True):
                some = slice(max(begin, first) - first, min(end, last) - first)
                if some.start < some.stop:
                    parts.append(self.read(array, some).astype(np.int64))
            yield np.concatenate(parts)


def _labels(array: TokenArray, some: slice) -> np.ndarray:
    tokens = array.flat[some].astype(np.int64)
    if array.labels is not None:
        return np.where(array.labels[some], tokens, IGNORE_INDEX)
    begins = np.asarray(array.begins)
    inside = begins[(begins >= some.start) & (begins < some.stop)]
    tokens[inside - some.start] = IGNORE_INDEX
    return tokens
