"""Files of ready tokens, memory-mapped: flat uint16/uint32 streams, and Megatron's .bin/.idx.

A flat stream has no index: its documents end behind each end-of-text id, which must be given.
Megatron's index has the lengths of sequences, and where documents begin among them.

    .idx   magic 9 | version 8 | dtype 1 | sequences 8 | documents 8
           int32 lengths [sequences] | int64 byte offsets [sequences] | int64 documents [documents]
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ..jit import jit
from .token_store import TokenArray

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def megatron_shelf(prefix: Path, source: int = 0) -> TokenArray:
    """Open `prefix.bin` and `prefix.idx`; every document is one sample."""
    index, binary = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    with index.open("rb") as file:
        head = file.read(34)
    if len(head) < 34 or not head.startswith(MAGIC):
        raise ValueError(f"{index.name}: not a Megatron index, it begins with {head[:9]!r}")
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
    kind = np.dtype(DTYPES.get(code, "f8"))
    if version != 1 or kind.kind not in "iu":
        raise ValueError(f"{index.name}: version {version}, dtype code {code} are not token ids")
    needed = 34 + 12 * sequences + 8 * documents
    if index.stat().st_size < needed:
        raise ValueError(f"{index.name} has {index.stat().st_size} bytes, needs {needed}: torn")
    data = np.memmap(index, np.uint8, "r")
    lengths = data[34:][: 4 * sequences].view("<i4")
    pointers = data[34 + 4 * sequences :][: 8 * sequences].view("<i8")
    bounds = data[34 + 12 * sequences :][: 8 * documents].view("<i8")
    return _documents(_mapped(binary, kind), kind, lengths, pointers, bounds, prefix.name, source)


def _documents(flat, kind, lengths, pointers, bounds, name: str, source: int) -> TokenArray:
    """Join the sequences of each document; they must lie one behind the other."""
    total = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    covered = not len(bounds) or (bounds[0] == 0 and bounds[-1] == len(lengths))
    if not covered or (np.diff(bounds) < 0).any() or (len(lengths) and lengths.min() < 0):
        raise ValueError(f"{name}.idx: its documents do not cover its {len(lengths)} sequences")
    begins = pointers // kind.itemsize
    if (len(lengths) and (pointers % kind.itemsize).any()) or not np.array_equal(
        begins, total[:-1]
    ):
        raise ValueError(f"{name}.idx: sequences do not lie one behind the other")
    if total[-1] > len(flat):
        raise ValueError(f"{name}.bin holds {len(flat)} tokens, its index {total[-1]}: torn")
    first = bounds[:-1] if len(bounds) else np.arange(len(lengths))
    last = bounds[1:] if len(bounds) else np.arange(1, len(lengths) + 1)
    return TokenArray(name, flat, total[first], total[last] - total[first], None, source)


def flat_shelves(paths: list[Path], dtype: str, eos: int, source: int = 0) -> list[TokenArray]:
    """Open flat streams of tokens, and refuse an `eos` that is in none of them."""
    shelves = [flat_shelf(path, dtype, eos, source) for path in paths]
    filled = [shelf for shelf in shelves if len(shelf.flat)]
    if filled and not any(shelf.flat[shelf.lengths[0] - 1] == eos for shelf in filled):
        raise ValueError(
            f"{paths[0]}: eos={eos} is nowhere among its tokens, all would be one document: "
            "pass the eos= that ends its documents, and the dtype= it was written with"
        )
    return shelves


def flat_shelf(path: Path, dtype: str, eos: int, source: int = 0) -> TokenArray:
    """Open a flat stream of tokens; a document ends with `eos`, which it keeps."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise ValueError(f"dtype {dtype!r}: tokens are integers, uint16 or uint32")
    flat = _mapped(path, kind)
    ends = _ends(flat, eos, np.empty(1 << 16, np.int64))
    if len(flat) and (not len(ends) or ends[-1] < len(flat)):
        ends = np.append(ends, len(flat))
    begins = np.concatenate([[0], ends])[: len(ends)].astype(np.int64)
    return TokenArray(path.name, flat, begins, ends - begins, None, source)


@jit
def _ends(flat, eos, room):
    """Find the places behind each eos."""
    count = 0
    for i in range(len(flat)):
        if flat[i] == eos:
            if count == len(room):
                larger = np.empty(2 * count, np.int64)
                larger[:count] = room
                room = larger
            room[count] = i + 1
            count += 1
    return room[:count].copy()


def _mapped(path: Path, kind: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % kind.itemsize:
        raise ValueError(f"{path.name} has {size} bytes, no whole number of {kind} tokens: torn")
    return np.asarray(np.memmap(path, kind, "r")) if size else np.empty(0, kind)
