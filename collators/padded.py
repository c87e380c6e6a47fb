"""`PaddedCollator`: samples padded to the longest of the batch, the baseline for packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..packing import IGNORE_INDEX, Sample
from .features import as_samples
from .packed import check_pad_token_id, is_integer


class PaddedCollator:
    """Pad samples on the right, with an attention mask; padding is ignored by the loss.

    Args:
        pad_token_id: the id to pad with; the loss ignores it.
        pad_to_multiple_of: round the width of a batch up to a multiple of this.

    >>> batch = PaddedCollator(pad_token_id=0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]])
    """

    def __init__(self, *, pad_token_id: int = 0, pad_to_multiple_of: int = 1):
        if not is_integer(pad_to_multiple_of, 1):
            raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of!r}: pass at least 1")
        check_pad_token_id(pad_token_id)
        self.pad_token_id = int(pad_token_id)
        self.pad_to_multiple_of = int(pad_to_multiple_of)

    def __call__(self, rows: Sequence[Mapping | Sample]) -> dict[str, torch.Tensor]:
        if not len(rows):
            raise ValueError("an empty list cannot be collated: pass at least one sample")
        samples, multiple = as_samples(rows), self.pad_to_multiple_of
        if any(sample.target is not None for sample in samples):
            raise ValueError(
                "a row has the label of a document, but PaddedCollator is for causal LMs: collate "
                "with PackedCollator, or with DataCollatorWithPadding of Transformers"
            )
        width = -(-max(len(sample) for sample in samples) // multiple) * multiple
        batch = {
            "input_ids": torch.full((len(samples), width), self.pad_token_id),
            "labels": torch.full((len(samples), width), IGNORE_INDEX),
            "attention_mask": torch.zeros((len(samples), width), dtype=torch.int64),
        }
        for i, sample in enumerate(samples):
            batch["input_ids"][i, : len(sample)] = torch.from_numpy(sample.tokens)
            batch["labels"][i, : len(sample)] = torch.from_numpy(sample.labels)
            batch["attention_mask"][i, : len(sample)] = 1
        return batch
