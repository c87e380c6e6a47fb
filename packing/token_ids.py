"""Validate token ids, labels and loss masks from outside before anything is built on them.

Values are never rounded, wrapped or guessed: a float, a bool, a negative id or an id beyond the
vocabulary raises an error that shows the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .sample import IGNORE_INDEX, Sample

MAX_TOKEN_ID = 2**31 - 1
"""The largest id if the vocabulary is not known; no vocabulary is that large."""
LOSS_MASKS = frozenset((
    "loss_mask", "loss_masks", "loss_weights", "label_mask", "labels_mask", "completion_mask",
    "assistant_mask", "assistant_masks",
))  # fmt: skip
"""Columns in which libraries say which tokens count; packing reads only labels."""


def validate_token_ids(ids: Any, name: str = "input_ids") -> np.ndarray:
    """Return ids as int64 [n], n >= 1, or raise; `name` is the name that errors show.

    >>> validate_token_ids([5, 6]).tolist()
    [5, 6]
    >>> validate_token_ids([5, 1.5])
    Traceback (most recent call last):
    ValueError: input_ids must be integers, got float64
    """
    if not isinstance(ids, list | tuple | np.ndarray):
        ids = _to_array(ids, name)
    if not isinstance(ids, np.ndarray):
        if bool in set(map(type, ids)):
            raise ValueError(f"{name} must be integers, got bool")
        ids = _to_array(ids, name)
    if ids.ndim != 1:
        raise ValueError(f"{name} must be one row of integers, got the shape {ids.shape}")
    if not len(ids):
        raise ValueError(f"{name} is empty: a document needs at least one token")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {_type_name(ids)}")
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} contains {ids.max()}, beyond 64 bits")
    return ids.astype(np.int64)


IMAGE_PARTS = ("image", "image_url")
"""Types of the parts of a message that are images."""


def refuse_images(row: Mapping[str, Any]) -> None:
    """Raise if a row, or a message of a chat, has images, which would be ignored."""
    names = [name for name in ("images", "pixel_values") if name in row]
    found = any(row[name] is not None and _is_filled(row[name]) for name in names)
    parts = row.get("content")
    if isinstance(parts, list):
        found = found or any(part.get("type") in IMAGE_PARTS for part in parts)
    if found:
        raise ValueError(
            "the row has images: pass messages, or text and images, and "
            "PackedDataset(tokenizer=AutoProcessor.from_pretrained(...))"
        )


def _is_filled(value: Any) -> bool:
    return not isinstance(value, list | tuple) or len(value) > 0


def make_sample(ids: Any, labels: Any = None, vocab_size: int | None = None) -> Sample:
    """Build a sample from a row's token ids and labels, or raise if they are invalid."""
    ids = validate_token_ids(ids)
    _check_range(ids, vocab_size, "input_ids")
    if labels is None:
        return Sample(ids)
    labels = validate_token_ids(labels, "labels")
    if len(labels) != len(ids):
        raise ValueError(f"{len(ids)} input_ids but {len(labels)} labels: one label per token")
    _check_range(labels[labels != IGNORE_INDEX], vocab_size, "labels")
    return Sample(ids, labels)


def check_masks(row: Mapping[str, Any]) -> None:
    """Raise if a row has a loss mask that contradicts its labels.

    >>> check_masks({"input_ids": [5, 6], "loss_mask": [0, 1]})
    Traceback (most recent call last):
    ValueError: loss_mask without labels: pass labels, -100 where the loss ignores a token
    """
    for name in LOSS_MASKS & row.keys():
        mask, labels = row[name], row.get("labels")
        if mask is None:
            continue
        if labels is None:
            raise ValueError(
                f"{name} without labels: pass labels, {IGNORE_INDEX} where the loss ignores a token"
            )
        mask, labels = np.asarray(mask), np.asarray(labels)
        if mask.shape != labels.shape or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"{name} must be 0 or 1 for each label: fix it, or pass only labels")
        if (labels[mask == 0] != IGNORE_INDEX).any():
            raise ValueError(f"a token that {name} excludes has a label: remove one of the two")


def _check_range(ids: np.ndarray, vocab_size: int | None, name: str) -> None:
    if len(ids) and ids.min() < 0:
        raise ValueError(f"{name} contains {ids.min()}: ids start at 0")
    if len(ids) and vocab_size is not None and ids.max() >= vocab_size:
        raise ValueError(f"{name} contains {ids.max()}, the vocabulary has {vocab_size} entries")
    if len(ids) and ids.max() > MAX_TOKEN_ID:
        raise ValueError(f"{name} contains {ids.max()}: no vocabulary has ids over {MAX_TOKEN_ID}")


def _to_array(ids: Any, name: str) -> np.ndarray:
    if ids is None or isinstance(ids, str | bytes | dict | set):
        raise ValueError(f"{name} must be a list of integers, got {type(ids).__name__}")
    try:
        return np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} must be one row of integers: {error}") from None


def _type_name(ids: np.ndarray) -> str:
    """Name the dtype, or for an object array the type of its first value that is not an int64."""
    if ids.dtype != object:
        return str(ids.dtype)
    odd = next((x for x in ids if not isinstance(x, int) or isinstance(x, bool)), ids[0])
    return f"{type(odd).__name__}" if not isinstance(odd, int) else f"{odd}, beyond 64 bits"
