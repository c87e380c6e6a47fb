"""Token ids and labels as they come from outside, checked before anything is built on them.

Nothing is rounded, wrapped or guessed: a float, a bool, a negative id or one beyond the
vocabulary is refused with its value and place.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from .sample import IGNORE_INDEX, Sample


def checked_ids(ids: Any, what: str = "input_ids") -> np.ndarray:
    """Give ids as int64 [n], n >= 1, or say why they are none.

    >>> checked_ids([5, 6]).tolist()
    [5, 6]
    >>> checked_ids([5, 1.5])
    Traceback (most recent call last):
    ValueError: input_ids must be integers, got float64
    """
    if not isinstance(ids, list | tuple | np.ndarray):
        ids = _as_array(ids, what)
    if not isinstance(ids, np.ndarray):
        if bool in set(map(type, ids)):
            raise ValueError(f"{what} must be integers, got bool")
        ids = _as_array(ids, what)
    if ids.ndim != 1:
        raise ValueError(f"{what} must be one row of integers, got the shape {ids.shape}")
    if not len(ids):
        raise ValueError(f"{what} is empty: a document needs at least one token")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {_kind(ids)}")
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{what} holds {ids.max()}, beyond 64 bits")
    return ids.astype(np.int64)


def checked_sample(ids: Any, labels: Any = None, vocab_size: int | None = None) -> Sample:
    """Build a sample from a row's own ids and labels, or say what is wrong with them."""
    ids = checked_ids(ids)
    _within(ids, vocab_size, "input_ids")
    if labels is None:
        return Sample(ids)
    marks = checked_ids(labels, "labels")
    if len(marks) != len(ids):
        raise ValueError(f"{len(ids)} input_ids but {len(marks)} labels: one label per token")
    _within(marks[marks != IGNORE_INDEX], vocab_size, "labels")
    return Sample(ids, marks)


def check_masks(columns: Collection[str], attention_mask: Any = None) -> None:
    """Refuse ready ids beside masks that nobody would look at: padding, or what counts.

    >>> check_masks({"input_ids", "completion_mask"})
    Traceback (most recent call last):
    ValueError: completion_mask without labels: give labels, -100 where a token does not count
    """
    for mask in ("completion_mask", "assistant_masks"):
        if mask in columns and "labels" not in columns:
            raise ValueError(
                f"{mask} without labels: give labels, {IGNORE_INDEX} where a token does not count"
            )
    if attention_mask is not None and not np.all(np.asarray(attention_mask)):
        raise ValueError("attention_mask holds 0, so there is padding: tokenize without it")


def _within(ids: np.ndarray, vocab_size: int | None, what: str) -> None:
    if len(ids) and ids.min() < 0:
        raise ValueError(f"{what} holds {ids.min()}: ids start at 0")
    if len(ids) and vocab_size is not None and ids.max() >= vocab_size:
        raise ValueError(f"{what} holds {ids.max()}, the vocabulary has {vocab_size} entries")


def _as_array(ids: Any, what: str) -> np.ndarray:
    if ids is None or isinstance(ids, str | bytes | dict | set):
        raise ValueError(f"{what} must be a list of integers, got {type(ids).__name__}")
    try:
        return np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{what} must be one row of integers: {error}") from None


def _kind(ids: np.ndarray) -> str:
    if ids.dtype != object:
        return str(ids.dtype)
    odd = next((x for x in ids if not isinstance(x, int) or isinstance(x, bool)), ids[0])
    return f"{type(odd).__name__}" if not isinstance(odd, int) else f"{odd}, beyond 64 bits"
