"""Prompts as a tokenizer returns them: a dict of `input_ids` and `attention_mask`, maybe padded.

{"input_ids": [[0, 0, 5], [6, 7, 8]],        ->   [5], [6, 7, 8]
 "attention_mask": [[0, 0, 1], [1, 1, 1]]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_WITHOUT_EFFECT = {
    "token_type_ids", "special_tokens_mask", "offset_mapping", "length", "num_truncated_tokens",
    "overflowing_tokens", "overflow_to_sample_mapping", "labels", "assistant_masks",
}  # fmt: skip
"""Keys of a tokenizer's output that do not change what a causal model reads."""


def split_batch(name: str, prompts: Any) -> Any:
    """Return the rows of a tokenizer's output, each with its mask; anything else unchanged.

    >>> split_batch("prompts", {"input_ids": [[5], [6, 7]]})
    [{'input_ids': [5]}, {'input_ids': [6, 7]}]
    """
    if not isinstance(prompts, Mapping):
        return prompts
    ids, mask = _columns(name, prompts)
    if len(ids) and not hasattr(ids[0], "__len__"):
        raise ValueError(f"{name} is one tokenized text; pass a list: tokenizer([text])")
    if mask is None:
        return [{"input_ids": row} for row in ids]
    if len(mask) != len(ids):
        raise ValueError(f"{name} has {len(ids)} rows of ids and {len(mask)} of attention_mask")
    return [
        {"input_ids": row, "attention_mask": row_mask}
        for row, row_mask in zip(ids, mask, strict=True)
    ]


def without_padding(prompt: Mapping[str, Any]) -> Any:
    """Return the ids of one tokenized text that its mask keeps.

    >>> without_padding({"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1]}).tolist()
    [5]
    """
    ids, mask = _columns("a prompt", prompt)
    if len(ids) and hasattr(ids[0], "__len__"):  # a batch of one, as `return_tensors` gives it
        if len(ids) > 1:
            raise ValueError(f"a prompt holds {len(ids)} tokenized texts; pass one for each")
        ids, mask = ids[0], None if mask is None else mask[0]
    if mask is None:
        return ids
    if len(ids) != len(mask):
        raise ValueError(f"a prompt has {len(ids)} ids and an attention_mask of {len(mask)}")
    kept = np.flatnonzero(np.asarray(mask))
    if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
        raise ValueError(
            "a prompt masks tokens in its middle, which the engine does not do: remove them from "
            "input_ids"
        )
    return np.asarray(ids)[kept]


def _columns(name: str, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The ids and the mask, as lists or arrays on the host."""
    if "input_ids" not in batch:
        raise ValueError(f"{name} is one {type(batch).__name__}; pass a list of prompts")
    unknown = sorted(set(batch) - _WITHOUT_EFFECT - {"input_ids", "attention_mask"})
    if unknown:
        raise ValueError(f"{name} holds {unknown[0]!r}, which the engine does not take: remove it")
    return to_host(batch["input_ids"]), to_host(batch.get("attention_mask"))


def to_host(values: Any) -> Any:
    """Return torch tensors as NumPy arrays; anything else unchanged."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values
