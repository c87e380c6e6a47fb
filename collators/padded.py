"""The honest baseline: samples padded to the longest of the batch, masked and uncounted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..packing import IGNORE_INDEX, Sample
from .row_layout import as_sample


class PaddedCollator:
    """Pad on the right, with an attention mask; what packing is measured against.

    >>> batch = PaddedCollator(pad_token_id=0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]])
    """

    def __init__(self, *, pad_token_id: int = 0, multiple: int = 1):
        """multiple: rows are as long as a multiple of this."""
        if multiple < 1:
            raise ValueError(f"multiple={multiple}: 1 or more, or leave it out")
        self.pad_token_id = pad_token_id
        self.multiple = multiple

    def __call__(self, rows: Sequence[Mapping | Sample]) -> dict[str, torch.Tensor]:
        if not len(rows):
            raise ValueError("an empty list cannot be collated: pass at least one sample")
        samples = [as_sample(row) for row in rows]
        width = -(-max(len(sample) for sample in samples) // self.multiple) * self.multiple
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
