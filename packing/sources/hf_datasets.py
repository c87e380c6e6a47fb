"""Hugging Face datasets: ready tokens straight from their Arrow memory, other rows by number.

A Dataset with `input_ids` is a token store: lengths and tokens lie in Arrow's own buffers, mapped
from disk, and are not touched by Python row by row. Formats are how rows would be handed out and
are passed over, but for the columns they leave out and for a transform: it makes other rows, the
same each time it is asked, or nothing could resume. A streaming IterableDataset is read in order;
its own state is the cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..state.fingerprint import Fingerprint
from ..state.run_state import is_count
from ..token_ids import check_masks
from .in_memory import row_at
from .paths import contained
from .source import Indexed, Row, RowSource
from .token_store import TokenArray

FIRST = 1024
"""Rows looked at for padding."""


def token_shelves(data: Any, name: str, source: int = 0) -> list[TokenArray] | None:
    """Give the shelves of a Dataset with ready `input_ids`; None if it has none."""
    data = _plain(data)
    if "input_ids" not in data.column_names or _transforms(data):
        return None
    if data._indices is not None:
        data = data.flatten_indices()
    _check_masks(data, name)
    columns = ["input_ids", "labels"] if "labels" in data.column_names else ["input_ids"]
    shelves, row = [], 0
    for batch in data.data.table.select(columns).to_batches():  # columns cut at the same rows
        shelves.append(_shelf(batch.columns, name, row, source))
        row += len(batch)
    return shelves


def _plain(data: Any) -> Any:
    """Give the columns that a Dataset's format shows, as they lie in it."""
    shown, all_columns = data.format["columns"], data.format["output_all_columns"]
    if _transforms(data):
        return data
    return data.with_format(None).select_columns(data.column_names if all_columns else shown)


def _transforms(data: Any) -> bool:
    return data.format["type"] == "custom"


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


def _shelf(arrays: list, name: str, row: int, source: int) -> TokenArray:
    flat, lengths, nulls = _flat(arrays[0], name)
    labels = None
    if len(arrays) > 1:
        labels, label_lengths, more = _flat(arrays[1], name)
        nulls |= more
        if not np.array_equal(lengths, label_lengths):
            odd = int(np.flatnonzero(lengths != label_lengths)[0])
            raise ValueError(
                f"{name}, row {row + odd}: {lengths[odd]} input_ids but {label_lengths[odd]} labels"
            )
    begins = np.cumsum(lengths) - lengths
    return TokenArray(name, flat, begins, np.where(nulls, 0, lengths), labels, source)


def _flat(array: Any, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give a list column's values, as a view of its memory, its lengths, and where it has nulls."""
    if not _is_list(array.type):
        raise ValueError(f"{name}: input_ids and labels must be lists, got {array.type}")
    if not pa.types.is_integer(array.type.value_type):
        raise ValueError(f"{name}: ids and labels must be integers, got {array.type.value_type}")
    if pa.types.is_fixed_size_list(array.type):
        offsets = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values[offsets[0] : offsets[-1]]
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    if values.null_count:
        lacking = values.is_null().to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(lacking)])
        nulls |= np.diff(before[offsets - offsets[0]]) > 0
        values = values.fill_null(0)
    return values.to_numpy(), np.diff(offsets), nulls


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(fits(kind) for fits in lists)


class TableRows(Indexed):
    """Rows of a Dataset that still have to be encoded; known by its size and some 256 of them."""

    def __init__(self, data: Any, name: str):
        self.data, self.name = _plain(data), name
        self.size = int(data.data.nbytes)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, numbers):
        if not _transforms(self.data):
            return self.data.select(numbers).to_list()
        # One by one: what a transform makes of a row must not depend on the rows beside it.
        return [row_at(self.data, number) for number in numbers.tolist()]

    def fingerprint(self):
        mark = Fingerprint("dataset", len(self.data), self.data.column_names)
        for row in self.rows(np.arange(0, len(self.data), max(1, len(self.data) // 256))):
            mark.row(str(row) if isinstance(row, ValueError) else row)
        return mark.text()


class StreamedRows(RowSource):
    """Rows of an IterableDataset, in its own order; known by its first four.

    Its state names every dataset that it was joined from, so a shard's state holds one of them.
    """

    reads_on = True

    def __init__(self, data: Any, name: str):
        if any("Shuffled" in step for step in _steps(data._ex_iterable)):
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


def _steps(examples: Any) -> Iterator[str]:
    """Name the steps an IterableDataset goes through, in all that it is put together from."""
    yield type(examples).__name__
    before = getattr(examples, "ex_iterable", None)
    for one in getattr(examples, "ex_iterables", [] if before is None else [before]):
        yield from _steps(one)


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
