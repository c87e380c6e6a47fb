"""Remove the padding of tokenized prompts by their attention mask; refuse padding without a mask.

{"input_ids": [[0, 0, 5], [6, 7, 8]],        ->   [5], [6, 7, 8]
 "attention_mask": [[0, 0, 1], [1, 1, 1]]}

Ids without a mask that begin or end with padding raise: the model would read it as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor

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
    if len(ids) and not _has_length(ids[0]):
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
    if len(ids) and _has_length(ids[0]):  # a batch of one, as `return_tensors` gives it
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


def check_rows(prompts: Sequence[Any], pad: int) -> None:
    """Refuse rows of ids of one length of which some start or end with the padding token."""
    rows = [_ids_without_mask(prompt) for prompt in prompts]
    if len(rows) < 2 or any(row is None for row in rows) or len({*map(len, rows)}) > 1:
        return
    for index, row in enumerate(rows):
        if len(row) > 1 and (_is_id(row[0], pad) or _is_id(row[-1], pad)):
            raise ValueError(f"prompt {index}: {_padded(pad)}")


def check_ends(ids: np.ndarray, pad: Callable[[], int | None]) -> None:
    """Refuse ids that start or end with several padding tokens; `pad` is asked only if needed."""
    if len(ids) < 3:
        return
    for outer, inner in ((0, 1), (-1, -2)):
        if ids[outer] == ids[inner] == pad():
            raise ValueError(_padded(int(ids[outer])))


def has_mask(prompt: Any) -> bool:
    """Return whether a prompt says which of its tokens are padding."""
    return isinstance(prompt, Mapping) and prompt.get("attention_mask") is not None


def _padded(pad: int) -> str:
    return (
        f"it starts or ends with the padding token {pad}, which the model would read as text: "
        "pass the tokenizer's whole output, with its attention_mask, or do not pad"
    )


def _ids_without_mask(prompt: Any) -> Any:
    """The ids of a prompt that is given as such and says nothing about padding, else None."""
    if isinstance(prompt, Mapping):
        prompt = None if has_mask(prompt) else prompt.get("input_ids")
    prompt = to_host(prompt)
    is_row = _has_length(prompt) and not isinstance(prompt, str) and len(prompt) > 0
    return prompt if is_row and not _has_length(prompt[0]) else None


def _has_length(value: Any) -> bool:
    return isinstance(value, Sized)


def _is_id(value: Any, token: int) -> bool:
    return isinstance(value, (int, np.integer)) and value == token


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
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values
