"""Hugging Face datasets: ready tokens directly from their Arrow memory, other rows by number.

A Dataset with `input_ids` is a token store: lengths and tokens are in Arrow's own buffers, mapped
from disk, and Python does not touch them row by row. Rows that are packed already are cut into
their documents (`document_starts.py`). A dataset's format is ignored, except for the columns it
hides and for a transform, which produces other rows: they must be the same each time, or a run
could not resume. A streaming IterableDataset is read in order; its own state is the cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..document_starts import BOUNDARY_COLUMNS, Lists, inner_starts
from ..state.content_key import HashedStream
from ..state.fingerprint import Fingerprint
from ..state.run_state import is_non_negative_int
from ..token_ids import LOSS_MASKS, check_masks, refuse_images
from .in_memory import row_or_error
from .indexed_source import IndexedSource
from .null_fields import drop_null_fields
from .paths import resolve_inside
from .source import Row, RowSource, cursor_error
from .token_store import TokenArray

TOKEN_COLUMNS = ("input_ids", "labels", *sorted(LOSS_MASKS), *sorted(BOUNDARY_COLUMNS))
"""Columns of ready tokens that are read."""


def token_arrays(data: Any, name: str, source: int = 0) -> list[TokenArray] | None:
    """Return the token arrays of a Dataset with ready `input_ids`; None without that column."""
    data = _visible_columns(data)
    if "input_ids" not in data.column_names or _has_transform(data):
        return None
    if data._indices is not None:
        data = data.flatten_indices()
    if "pixel_values" in data.column_names:
        refuse_images({"pixel_values": True})
    columns = [column for column in TOKEN_COLUMNS if column in data.column_names]
    arrays, row = [], 0
    try:
        for batch in data.data.table.select(columns).to_batches():  # columns cut at the same rows
            arrays.append(_token_array(batch, name, row, source))
            row += len(batch)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return arrays


def _visible_columns(data: Any) -> Any:
    """Return a Dataset with the columns that its format shows, without the format."""
    shown, all_columns = data.format["columns"], data.format["output_all_columns"]
    if _has_transform(data):
        return data
    return data.with_format(None).select_columns(data.column_names if all_columns else shown)


def _has_transform(data: Any) -> bool:
    return data.format["type"] == "custom"


def _token_array(batch: pa.RecordBatch, name: str, row: int, source: int) -> TokenArray:
    flat, lengths, nulls = _flatten_lists(batch.column("input_ids"))
    labels = None
    if "labels" in batch.schema.names:
        labels, label_lengths, label_nulls = _flatten_lists(batch.column("labels"))
        nulls |= label_nulls
        if not np.array_equal(lengths, label_lengths):
            odd = int(np.flatnonzero(lengths != label_lengths)[0])
            raise ValueError(
                f"row {row + odd}: {lengths[odd]} input_ids but {label_lengths[odd]} labels"
            )
    masks = {column: values for column, (values, _) in _lists(batch, LOSS_MASKS).items()}
    check_masks(masks | ({} if labels is None else {"labels": labels}))
    begins = np.cumsum(lengths) - lengths
    starts = inner_starts(_lists(batch, BOUNDARY_COLUMNS), lengths)
    if len(starts):  # the rows are packed already: cut them into their documents
        row_of = np.searchsorted(np.cumsum(lengths), starts, side="right")
        nulls = np.concatenate([nulls, nulls[row_of]])
        order = np.argsort(np.concatenate([begins, starts]), kind="stable")
        begins, nulls = np.concatenate([begins, starts])[order], nulls[order]
        lengths = np.diff(np.append(begins, len(flat)))
    return TokenArray(name, flat, begins, np.where(nulls, 0, lengths), labels, source)


def _lists(batch: pa.RecordBatch, names: Iterable[str]) -> dict[str, Lists]:
    """Return the columns of these names that are lists, flat, with the length of each row."""
    columns: dict[str, Lists] = {}
    for name in names:
        array = batch.column(name) if name in batch.schema.names else None
        if array is None or not _is_list(array.type) or array.null_count == len(array):
            continue
        if array.null_count:
            raise ValueError(f"{name} is null in some rows: fill it, or remove the column")
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        columns[name] = array.flatten().to_numpy(zero_copy_only=False), lengths.astype(np.int64)
    return columns


def _flatten_lists(array: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a list column's values as a view of its memory, its lengths, and its nulls."""
    if not _is_list(array.type):
        raise ValueError(f"input_ids and labels must be lists, got {array.type}")
    if not pa.types.is_integer(array.type.value_type):
        raise ValueError(f"ids and labels must be integers, got {array.type.value_type}")
    if pa.types.is_fixed_size_list(array.type):
        offsets = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values[offsets[0] : offsets[-1]]
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    if values.null_count:
        null_values = values.is_null().to_numpy(zero_copy_only=False)
        nulls_before = np.concatenate([[0], np.cumsum(null_values)])
        nulls |= np.diff(nulls_before[offsets - offsets[0]]) > 0
        values = values.fill_null(0)
    return values.to_numpy(), np.diff(offsets), nulls


def _is_list(arrow_type: pa.DataType) -> bool:
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(arrow_type) for is_type in types)


class DatasetSource(IndexedSource):
    """Rows of a Dataset to be encoded; identified by its size and about 256 of its rows."""

    def __init__(self, data: Any, name: str):
        self.data, self.name = _visible_columns(data), name
        self.num_bytes = int(data.data.nbytes)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, numbers):
        if not _has_transform(self.data):
            return [drop_null_fields(row) for row in self.data.select(numbers).to_list()]
        # One by one: the result of a transform must not depend on the other rows of a batch.
        return [row_or_error(self.data, number) for number in numbers.tolist()]

    def fingerprint(self):
        fingerprint = Fingerprint("dataset", len(self.data), self.data.column_names)
        for row in self.rows(np.arange(0, len(self.data), max(1, len(self.data) // 256))):
            fingerprint.row(str(row) if isinstance(row, ValueError) else row)
        return fingerprint.text()

    def cache_key(self):
        if _has_transform(self.data):
            return None
        stream, writer = HashedStream(f"dataset {self.name}"), None
        for table in self.data.with_format("arrow").iter(batch_size=1000):
            writer = writer or pa.ipc.new_stream(stream, table.schema)
            writer.write_table(table)
        return stream.hexdigest()


class IterableDatasetSource(RowSource):
    """Rows of an IterableDataset in its own order; identified by its first four.

    Its state names every dataset that it was joined from, so a shard's state contains it once.
    """

    sequential_only = True

    def __init__(self, data: Any, name: str):
        if any("Shuffled" in step for step in _pipeline_steps(data._ex_iterable)):
            raise ValueError(
                f"{name} was shuffled through a buffer, which no state can restore: pass it "
                "unshuffled; PackedDataset(shuffle=...) shuffles blocks and resumes exactly"
            )
        # Decoded images of samples that wait for a pack would take too much memory.
        self.data = data.decode(False) if "Image(" in str(data.features) else data
        self.name = name

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        divisible = self.data.num_shards % shards == 0
        # Shard 0 of 1 is the full dataset as a new object: the state is kept in the object.
        data = self.data.shard(shards, shard) if divisible else self.data.shard(1, 0)
        number = 0
        if isinstance(cursor, dict):
            data.load_state_dict(cursor["state"])
            number = cursor["row"]

        def cursor_after() -> dict:
            return {"state": data.state_dict(), "row": number}

        # `iter` in batches of one: plain iteration inside a worker takes only a share of the rows.
        for batch in data.iter(batch_size=1):
            number += 1
            if divisible or (number - 1) % shards == shard:
                row = drop_null_fields({name: values[0] for name, values in batch.items()})
                yield Row(row, f"{self.name}, row {number - 1} of shard {shard}", cursor_after)

    def check_cursor(self, cursor):
        if cursor is None:
            return
        if not isinstance(cursor, dict) or not is_non_negative_int(cursor.get("row")):
            raise cursor_error(self.name, cursor)

    def fingerprint(self):
        fingerprint = Fingerprint("stream", self.data.num_shards)
        for row in islice(self.data.iter(batch_size=1), 4):
            fingerprint.row(row)
        return fingerprint.text()


def _pipeline_steps(examples: Any) -> Iterator[str]:
    """Yield the class names of an IterableDataset's steps, in all datasets it was joined from."""
    yield type(examples).__name__
    parent = getattr(examples, "ex_iterable", None)
    for part in getattr(examples, "ex_iterables", [] if parent is None else [parent]):
        yield from _pipeline_steps(part)


def open_hub(name: str) -> Any:
    """Stream the training split of a dataset on the hub, or raise if it does not exist."""
    from datasets import load_dataset

    try:
        return load_dataset(name, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} is not a file or folder here, nor on the hub: {reason}"
        ) from error


def open_saved(folder: Path) -> Any:
    """Open a folder written by `save_to_disk`, after checking that its files are inside it."""
    import datasets

    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    for entry in state.get("_data_files", []):
        resolve_inside(folder, str(entry.get("filename")))
    return datasets.load_from_disk(str(folder))
