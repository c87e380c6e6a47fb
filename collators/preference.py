"""Chosen and rejected answers to one prompt, packed: every answer is a sequence of its own.

    {prompt p, chosen c, rejected r}   ─▶   [ p p c c c | p p r r ]      labels only on c and r
                                              0           1              pair 0

The prompt stands in both sequences, so that each is exactly what the model sees alone, under any
attention. Sequence 2i is the chosen and 2i + 1 the rejected answer of pair i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..packing import IGNORE_INDEX, Sample, checked_ids, checked_sample
from ..packing.planning import whole
from .packed import PackedCollator

PARTS = ("prompt_ids", "chosen_ids", "rejected_ids")


class PreferenceCollator:
    """Collate preference pairs into one packed row.

    >>> pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]}
    >>> batch = PreferenceCollator()([pair])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[1, 2, 3, 4, 5, 1, 2, 6]], [[-100, -100, 3, 4, 5, -100, -100, 6]])
    >>> batch["cu_seq_lens_q"].tolist(), batch["is_chosen"].tolist()
    ([0, 5, 8], [True, False])
    """

    def __init__(self, *, max_length: int | None = None, **packed: Any):
        """max_length: the longest sequence; an answer loses its tail, and then the prompt its head.

        A prompt is cut once for its pair, so that both answers are judged behind the same one.
        packed: what `PackedCollator` takes, but for fixed shapes: a pair is as long as it is.
        """
        if max_length is not None and whole(max_length=max_length)[0] < 2:
            raise ValueError(f"max_length={max_length}: a prompt and an answer need a token each")
        for name in ("fill", "fixed_sequences", "stack"):
            if packed.get(name):
                raise ValueError(f"{name}={packed[name]}: pairs have no budget to be filled up to")
        self.max_length = max_length
        self._packed = PackedCollator(**packed)

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [sample for pair in pairs for sample in self._samples(pair)]
        batch = self._packed(samples)
        batch["is_chosen"] = torch.arange(len(samples)) % 2 == 0
        return batch

    def _samples(self, pair: Mapping[str, Any]) -> list[Sample]:
        """Give the chosen and the rejected answer, each behind the prompt they share."""
        if not isinstance(pair, Mapping) or any(name not in pair for name in PARTS):
            got = list(pair) if isinstance(pair, Mapping) else type(pair).__name__
            raise ValueError(f"a pair needs prompt_ids, chosen_ids and rejected_ids, got {got}")
        prompt, *answers = (checked_ids(pair[name], name) for name in PARTS)
        if self.max_length is not None:
            answers = [answer[: self.max_length - 1] for answer in answers]
            prompt = prompt[-(self.max_length - max(map(len, answers))) :]
        mark = np.full(len(prompt), IGNORE_INDEX)
        return [
            checked_sample(np.concatenate([prompt, answer]), np.concatenate([mark, answer]))
            for answer in answers
        ]


def sequence_log_probs(
    token_losses: torch.Tensor, labels: torch.Tensor, cu_seq_lens: torch.Tensor
) -> torch.Tensor:
    """Sum the log-probability of each sequence's counted tokens, ready for DPO-like losses.

    token_losses stand at the positions of their labels; [1, T] each.

    >>> losses, labels = torch.tensor([[0.0, 1, 2, 9, 4]]), torch.tensor([[-100, 6, 7, -100, 8]])
    >>> sequence_log_probs(losses, labels, torch.tensor([0, 3, 5])).tolist()
    [-3.0, -4.0]
    """
    counted = (token_losses * (labels != IGNORE_INDEX)).flatten()
    lengths = cu_seq_lens.diff().long()
    owner = torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(counted)
    )
    return -counted.new_zeros(len(lengths)).index_add(0, owner, counted)
