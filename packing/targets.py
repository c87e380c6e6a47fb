"""Targets: a label for a document, or for each of its tokens, for heads other than an LM's.

    {"text": ..., "label": 3}            a class of the document
    {"text": ..., "label": 0.7}          its score
    {"text": ..., "label": [0.0, 1.0]}   floats: one for each class, of which several may apply
    {"input_ids": [5, 6, 7],
     "label": [0, 2, -100]}              integers: a class for each token, -100 where the loss
                                         ignores it

A target travels with its sample into the pack. Documents with targets are not split: a document
that is too long raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from .sample import Sample

Target = int | float | np.ndarray


def make_target(value: Any, num_tokens: int, name: str = "label") -> Target:
    """Return a label from outside as a target, or raise if it is none; `name` is its column.

    >>> make_target(2, 3), make_target([0, 2, -100], 3).tolist(), make_target([0.0, 1.0], 3).dtype
    (2, [0, 2, -100], dtype('float32'))
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _finite(np.float64(value), name).item()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        array = np.empty(0, object)
    if array.ndim == 0 and array.dtype.kind in "iuf":
        return make_target(array.item(), num_tokens, name)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"{name} is {value!r:.40}: pass the number of a class, a score, floats for several "
            "classes, or an integer for each token"
        )
    if array.dtype.kind == "f":
        return _finite(array.astype(np.float32), name)
    if len(array) != num_tokens:
        raise ValueError(
            f"{name} has {len(array)} integers, but the document {num_tokens} tokens: pass one for "
            "each token, with input_ids; or floats, if the document has several classes"
        )
    return array.astype(np.int64)


def _finite(values: Any, name: str) -> Any:
    if not np.isfinite(values).all():
        raise ValueError(f"{name} is {values}: a score is a finite number")
    return values


def is_per_token(target: Any) -> bool:
    """Return whether a target has a label for each token."""
    return isinstance(target, np.ndarray) and target.dtype.kind == "i"


def add_target(sample: Sample, value: Any, name: str = "label") -> Sample:
    """Return a sample with a target, or raise if the value is none; `name` is its column."""
    return replace(sample, target=make_target(value, len(sample), name))


def cut_targets(
    targets: Sequence[Any], starts: np.ndarray, lengths: np.ndarray
) -> list[Target] | None:
    """Return the target of each sequence of a pack; None if samples have none.

    starts, lengths: of the sequences in their samples.

    >>> cut_targets([np.array([4, 5, 6]), np.array([7])], np.array([1, 0]), np.array([2, 1]))
    [array([5, 6]), array([7])]
    """
    if all(target is None for target in targets):
        return None
    cut: list[Target] = []
    for target, start, length in zip(targets, starts.tolist(), lengths.tolist(), strict=True):
        if target is None or (start and not is_per_token(target)):
            reason = "has no label" if target is None else "has one label, but was split"
            raise ValueError(
                f"a document {reason}: label every row, and pass overflow='truncate' or a larger "
                "budget"
            )
        cut.append(target[start : start + length] if is_per_token(target) else target)
    return cut


def check_unsplit(encoder: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a packer of documents with targets or images, or raise if none fits.

    A document that is too long raises, unless it is to be dropped or, with targets, truncated.
    """
    if encoder.tokens_suffice:
        return settings
    if settings["strategy"] == "concat":
        what = "have labels" if encoder.processor is None else "may have images"
        raise ValueError(f'strategy="concat" splits documents, which {what}: omit it')
    if encoder.processor is not None and settings["overflow"] == "truncate":
        raise ValueError('overflow="truncate" would cut images: pass "drop", or omit it')
    if settings["pad_to_multiple_of"] != 1:
        raise ValueError("pad_to_multiple_of= pads documents, whose heads would read it: omit it")
    return {**settings, "overflow": "error"} if settings["overflow"] == "split" else settings
