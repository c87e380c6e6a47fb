"""Hugging Face datasets: ready tokens straight from their Arrow memory, other rows by number.

A Dataset with `input_ids` is a token store: lengths and tokens lie in Arrow's own buffers, mapped
from disk, and are not touched by Python row by row. A streaming IterableDataset is read in order;
its own state is the cursor.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..fingerprint import Fingerprint
from ..ids import check_masks
from ..state import is_count
from ..token_store import Shelf
from .paths import contained
from .source import Indexed, Row, RowSource

FIRST = 1024
"""Rows looked at for padding."""


def token_shelves(data: Any, name: str, source: int = 0) -> list[Shelf] | None:
    """Give the shelves of a Dataset with ready `input_ids`; None if it has none."""
    if "input_ids" not in data.column_names:
        return None
    if data._indices is not None:
        data = data.flatten_indices()
    _check_masks(data, name)
    columns = ["input_ids", "labels"] if "labels" in data.column_names else ["input_ids"]
    chunks = zip(*(data.data.table.column(column).chunks for column in columns), strict=True)
    shelves, row = [], 0
    for arrays in chunks:
        shelves.append(_shelf(arrays, name, row, source))
        row += len(arrays[0])
    return shelves


def _check_masks(data: Any, name: str) -> None:
    """Refuse masks as `check_masks` does; of a table's padding, the first rows tell."""
    first = None
    if "attention_mask" in data.column_names:
        masks = data.data.table.column("attention_mask").slice(0, FIRST)
        if _is_list(masks.type):
            first = masks.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    try:
        check_masks(data.column_names, first)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _shelf(arrays: tuple, name: str, row: int, source: int) -> Shelf:
    flat, begins, lengths = _flat(arrays[0], name, row)
    if len(arrays) == 1:
        return Shelf(name, flat, begins, lengths, None, source)
    labels, label_begins, label_lengths = _flat(arrays[1], name, row)
    if not np.array_equal(lengths, label_lengths):
        odd = int(np.flatnonzero(lengths != label_lengths)[0])
        raise ValueError(
            f"{name}, row {row + odd}: {lengths[odd]} input_ids but {label_lengths[odd]} labels"
        )
    if not np.array_equal(begins, label_begins):
        labels = np.concatenate(
            [np.zeros(0, np.int64), *map(np.asarray, arrays[1].to_numpy(False))]
        )
        flat = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, arrays[0].to_numpy(False))])
        begins = np.cumsum(lengths) - lengths
    return Shelf(name, flat, begins, lengths, labels, source)


def _flat(array: Any, name: str, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give the values, begins and lengths of a list column, as views of its memory."""
    if not _is_list(array.type):
        raise ValueError(f"{name}: input_ids and labels must be lists, got {array.type}")
    if not pa.types.is_integer(array.type.value_type):
        raise ValueError(f"{name}: ids and labels must be integers, got {array.type.value_type}")
    if array.null_count or array.values.null_count:
        raise ValueError(f"{name}: rows {row} to {row + len(array) - 1} hold nulls")
    if pa.types.is_fixed_size_list(array.type):
        offsets = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.to_numpy(), offsets[:-1], np.diff(offsets)


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(fits(kind) for fits in lists)


class TableRows(Indexed):
    """Rows of a Dataset that still have to be encoded; known by its size and some 256 of them."""

    def __init__(self, data: Any, name: str):
        self.data, self.name = data.with_format(None), name
        self.size = int(data.data.nbytes)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, numbers):
        return self.data.select(numbers).to_list()

    def fingerprint(self):
        data = self.data.select(range(0, len(self.data), max(1, len(self.data) // 256)))
        mark = Fingerprint("dataset", len(self.data), self.data.column_names)
        for row in data:
            mark.row(row)
        return mark.text()


class StreamedRows(RowSource):
    """Rows of an IterableDataset, in its own order; known by its first four."""

    def __init__(self, data: Any, name: str):
        if "Shuffled" in _chain(data._ex_iterable):
            raise ValueError(
                f"{name} was shuffled through a buffer, which no state can bring back: pass it "
                "unshuffled, PackedDataset(shuffle=...) shuffles windows and resumes exactly"
            )
        self.data, self.name = data, name

    def read(self, shard, shards, cursor=None, shuffle=None):
        own = self.data.num_shards % shards == 0
        # One shard of one is the whole, as an object of its own: state lives in the object.
        data = self.data.shard(shards, shard) if own else self.data.shard(1, 0)
        number = 0
        if isinstance(cursor, dict):
            data.load_state_dict(cursor["state"])
            number = cursor["row"]

        def place() -> dict:
            return {"state": data.state_dict(), "row": number}

        # `iter` by batches of one, since plain iteration inside a worker takes a share of its own.
        for batch in data.iter(batch_size=1):
            number += 1
            if own or (number - 1) % shards == shard:
                row = {name: values[0] for name, values in batch.items()}
                yield Row(row, f"{self.name}, row {number - 1} of shard {shard}", place)

    def check_cursor(self, cursor):
        if cursor is None:
            return
        if not isinstance(cursor, dict) or not is_count(cursor.get("row")):
            raise ValueError(f"{self.name}: the cursor {str(cursor)[:60]!r} is not a place in it")

    def fingerprint(self):
        mark = Fingerprint("stream", self.data.num_shards)
        for row in islice(self.data.iter(batch_size=1), 4):
            mark.row(row)
        return mark.text()


def _chain(examples: Any) -> str:
    """Name the steps an IterableDataset goes through."""
    names = []
    while examples is not None:
        names.append(type(examples).__name__)
        examples = getattr(examples, "ex_iterable", None)
    return " ".join(names)


def open_hub(name: str) -> Any:
    """Stream the training split of a dataset on the hub, or say that there is none."""
    from datasets import load_dataset

    try:
        return load_dataset(name, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name} is no file or folder here, nor on the hub: {reason}") from error


def open_saved(folder: Path) -> Any:
    """Open what `save_to_disk` wrote, after checking that its files lie inside the folder."""
    import datasets

    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    for entry in state.get("_data_files", []):
        contained(folder, str(entry.get("filename")))
    return datasets.load_from_disk(str(folder))
