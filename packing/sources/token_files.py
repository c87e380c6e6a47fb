"""Read files of ready tokens (flat uint16/uint32, Megatron's .bin/.idx), and write Megatron's.

Local files are memory-mapped, remote ones are read in ranges. A remote flat file is read completely
once to find its documents; with Megatron's index this is not needed.

A flat file has no index: a document ends after each end-of-text id, which must be given.
Megatron's index has the lengths of sequences, and which sequences begin a document.

    .idx   magic 9 | version 8 | dtype 1 | sequences 8 | documents 8
           int32 lengths [sequences] | int64 byte offsets [sequences] | int64 documents [documents]
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..numba_jit import jit
from .mapped_file import MappedFile, map_file
from .mapped_index import MappedBegins, is_arange
from .paths import DataFile
from .remote import RemoteFile, RemoteTokens
from .token_store import TokenArray

MAGIC = b"MMIDIDX\x00\x00"
MASK, HEADER = ".mask", 34
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class MegatronIndex(NamedTuple):
    """The content of an `.idx` file, mapped."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    bounds: np.ndarray


def open_megatron(index: DataFile, binary: DataFile, source: int = 0) -> TokenArray:
    """Open a pair of `.idx` and `.bin`; every document is one sample."""
    dtype, lengths, pointers, bounds = read_index(index)
    flat, file = open_tokens(binary, dtype)
    name = binary.name.removesuffix(".bin")
    begins, lengths = _join_sequences(len(flat), dtype, lengths, pointers, bounds, name)
    return TokenArray(name, flat, begins, lengths, None, source, file)


def read_index(index: DataFile) -> MegatronIndex:
    """Read an `.idx` file; raise if it is not one, or truncated."""
    with index.open("rb") as file:
        header = file.read(HEADER)
    if len(header) < HEADER or not header.startswith(MAGIC):
        raise ValueError(f"{index.name}: not a Megatron index, it begins with {header[:9]!r}")
    version, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
    dtype = np.dtype(DTYPES.get(code, "f8"))
    if version != 1 or dtype.kind not in "iu":
        raise ValueError(f"{index.name}: version {version}, dtype code {code} is not supported")
    size, needed = index.stat().st_size, HEADER + 12 * sequences + 8 * documents
    if size < needed:
        raise ValueError(f"{index.name} has {size} bytes, needs {needed}: it is truncated")
    data = _index_bytes(index)
    lengths = data[HEADER:][: 4 * sequences].view("<i4")
    pointers = data[HEADER + 4 * sequences :][: 8 * sequences].view("<i8")
    bounds = data[HEADER + 12 * sequences :][: 8 * documents].view("<i8")
    return MegatronIndex(dtype, lengths, pointers, bounds)


def read_lengths(index: RemoteFile, count: int) -> np.ndarray:
    """Return only the lengths of an `.idx` file's sequences: a fifth of it."""
    return np.frombuffer(index.read(HEADER, HEADER + 4 * count), "<i4")


def _index_bytes(index: DataFile) -> np.ndarray:
    if isinstance(index, Path):
        return np.memmap(index, np.uint8, "r")
    with index.open() as file:
        return np.frombuffer(file.read(), np.uint8)


def open_tokens(file: DataFile, dtype: np.dtype) -> tuple[Any, MappedFile | None]:
    """Map a file of tokens, or open a remote one."""
    if isinstance(file, RemoteFile):
        return RemoteTokens(file, dtype), None
    return map_file(file, dtype)


def _join_sequences(
    num_tokens: int, dtype: np.dtype, lengths, pointers, bounds, name: str
) -> tuple[Any, np.ndarray]:
    """Join the sequences of each document, which must be contiguous: its begin and length.

    If every document is one sequence, both stay in the mapped index.
    """
    one_each = is_arange(bounds)
    covered = not len(bounds) or (bounds[0] == 0 and bounds[-1] == len(lengths))
    covered &= one_each or not (np.diff(bounds) < 0).any()
    if not covered or (len(lengths) and lengths.min() < 0):
        raise ValueError(f"{name}.idx: its documents do not cover its {len(lengths)} sequences")
    begins = MappedBegins(pointers, dtype.itemsize)
    if not begins.are_contiguous(lengths):
        raise ValueError(f"{name}.idx: sequences are not contiguous")
    end = int(begins[-1]) + int(lengths[-1]) if len(lengths) else 0
    if end > num_tokens:
        raise ValueError(f"{name}.bin has {num_tokens} tokens, its index {end}: it is truncated")
    if one_each:
        return begins, lengths
    total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return total[bounds[:-1]], total[bounds[1:]] - total[bounds[:-1]]


class MegatronWriter:
    """Writes documents to a `.bin` and its `.idx`, batch by batch.

    A `.mask`, one byte per token, says which tokens are labels, unless all are but the first of
    each document; Megatron does not read it. `files` has the size and checksum of each file.
    """

    def __init__(self, prefix: Path, dtype: np.dtype):
        self.prefix, self.dtype = prefix, dtype
        self.lengths: list[np.ndarray] = []
        self._tokens = _HashedFile(prefix.with_suffix(".bin"))
        self._mask: _HashedFile | None = None

    def add(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None) -> None:
        """Append documents; mask: bool, which tokens are labels, None for the default."""
        self._tokens.write(tokens.astype(self.dtype))
        if mask is not None and self._mask is None:
            self._mask = _HashedFile(self.prefix.with_suffix(MASK))
            for earlier in self.lengths:
                self._mask.write(default_mask(earlier))
        if self._mask is not None:
            self._mask.write(default_mask(lengths) if mask is None else mask)
        self.lengths.append(lengths.astype("<i4"))

    def close(self) -> dict[str, list]:
        """Write the index; return the size and the checksum of each file by its suffix."""
        lengths = np.concatenate([np.zeros(0, "<i4"), *self.lengths])
        ends = np.cumsum(lengths, dtype="<i8")
        index = _HashedFile(self.prefix.with_suffix(".idx"))
        code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
        header = struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        index.write(np.frombuffer(MAGIC + header, np.uint8))
        index.write(lengths)
        index.write((ends - lengths) * self.dtype.itemsize)
        index.write(np.arange(len(lengths) + 1, dtype="<i8"))
        files = {".bin": self._tokens, ".idx": index, MASK: self._mask}
        return {suffix: file.close() for suffix, file in files.items() if file is not None}


class _HashedFile:
    def __init__(self, path: Path):
        self.file, self.digest, self.size = path.open("wb"), hashlib.blake2b(digest_size=16), 0

    def write(self, values: np.ndarray) -> None:
        self.file.write(values.data)
        self.digest.update(values.data)
        self.size += values.nbytes

    def close(self) -> list:
        self.file.close()
        return [self.size, self.digest.hexdigest()]


def default_mask(lengths: np.ndarray) -> np.ndarray:
    """Return which tokens are labels by default: all but the first of each document."""
    mask = np.ones(int(lengths.sum()), bool)
    mask[np.cumsum(lengths) - lengths] = False
    return mask


def open_flat_files(
    paths: list[DataFile], dtype: str, eos_token_id: int, source: int = 0
) -> list[TokenArray]:
    """Open flat token files; raise if none of them contains the end-of-text id."""
    arrays = [open_flat_file(path, dtype, eos_token_id, source) for path in paths]
    filled = [array for array in arrays if len(array.flat)]
    if filled and not any(_first_document_ends(array, eos_token_id) for array in filled):
        raise ValueError(
            f"{paths[0]}: add_eos={eos_token_id} does not occur among its tokens, so all would be "
            "one document: pass the id that ends its documents as add_eos=, and the dtype= it was "
            "written with"
        )
    return arrays


def _first_document_ends(array: TokenArray, eos_token_id: int) -> bool:
    last = int(array.lengths[0]) - 1
    return int(array.flat[last : last + 1][0]) == eos_token_id


def open_flat_file(path: DataFile, dtype: str, eos_token_id: int, source: int = 0) -> TokenArray:
    """Open a flat token file; a document ends with `eos_token_id`, which it includes."""
    try:
        dtype_ = np.dtype(dtype)
    except TypeError:
        dtype_ = np.dtype(object)
    if dtype_.kind not in "iu":
        raise ValueError(f"dtype {dtype!r}: tokens are integers, uint16 or uint32")
    flat, file = open_tokens(path, dtype_)
    if isinstance(flat, RemoteTokens):
        ends = flat.positions(eos_token_id) + 1
    else:
        ends = _document_ends(flat, eos_token_id, np.empty(1 << 16, np.int64))
    if len(flat) and (not len(ends) or ends[-1] < len(flat)):
        ends = np.append(ends, len(flat))
    begins = np.concatenate([[0], ends])[: len(ends)].astype(np.int64)
    return TokenArray(path.name, flat, begins, ends - begins, None, source, file)


@jit
def _document_ends(flat, eos_token_id, buffer):
    """Return the position after each end-of-text id."""
    count = 0
    for i in range(len(flat)):
        if flat[i] == eos_token_id:
            if count == len(buffer):
                larger = np.empty(2 * count, np.int64)
                larger[:count] = buffer
                buffer = larger
            buffer[count] = i + 1
            count += 1
    return buffer[:count].copy()
