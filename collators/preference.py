"""Chosen and rejected answers to one prompt, packed: every answer is its own sequence.

    {prompt p, chosen c, rejected r}   ─▶   [ p p c c c | p p r r ]      labels only on c and r
                                              0           1              pair 0

Both sequences contain the prompt, so that the model sees each one as it would alone, under any
attention. Sequence 2i is the chosen and 2i + 1 the rejected answer of pair i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..packing import IGNORE_INDEX, Sample, make_sample, validate_token_ids
from ..packing.planning import check_ints
from .packed import PackedCollator

PAIR_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


class PreferenceBatch(dict):
    """A batch of packed pairs; trainers that expect padded pairs are told so."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"PreferenceCollator packs pairs and gives no {name!r}, which padded pairs have: omit "
            "data_collator= in TRL's DPOTrainer, or compute the loss of packed pairs with "
            "nopad.collators.preference.sequence_log_probs"
        )


class PreferenceCollator:
    """Collate preference pairs into one packed row.

    >>> pair = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]}
    >>> batch = PreferenceCollator()([pair])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[1, 2, 3, 4, 5, 1, 2, 6]], [[-100, -100, 3, 4, 5, -100, -100, 6]])
    >>> batch["cu_seq_lens_q"].tolist(), batch["is_chosen"].tolist()
    ([0, 5, 8], [True, False])
    """

    def __init__(self, *, max_length: int | None = None, **options: Any):
        """Choose how pairs are cut; a prompt is cut once, so that both answers follow the same.

        Args:
            max_length: the longest sequence; an answer loses its end, then the prompt its
                beginning. None: nothing is cut.
            options: those of `PackedCollator`, except for fixed shapes: pairs vary in length.
        """
        if max_length is not None and check_ints(max_length=max_length)[0] < 2:
            raise ValueError(f"max_length={max_length}: a prompt and an answer need a token each")
        for name in ("pad_to_budget", "fixed_sequences", "stack"):
            if options.get(name):
                raise ValueError(f"{name}={options[name]}: pairs have no budget to pad to")
        self.max_length = max_length
        self._collator = PackedCollator(**options)

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [sample for pair in pairs for sample in self._samples(pair)]
        batch = PreferenceBatch(self._collator(samples))
        batch["is_chosen"] = torch.arange(len(samples)) % 2 == 0
        return batch

    def _samples(self, pair: Mapping[str, Any]) -> list[Sample]:
        """Return the chosen and the rejected answer, each after their common prompt."""
        if not isinstance(pair, Mapping) or any(name not in pair for name in PAIR_COLUMNS):
            got = list(pair) if isinstance(pair, Mapping) else type(pair).__name__
            raise ValueError(f"a pair needs prompt_ids, chosen_ids and rejected_ids, got {got}")
        prompt, *answers = (validate_token_ids(pair[name], name) for name in PAIR_COLUMNS)
        if self.max_length is not None:
            answers = [answer[: self.max_length - 1] for answer in answers]
            prompt = prompt[-(self.max_length - max(map(len, answers))) :]
        ignored = np.full(len(prompt), IGNORE_INDEX)
        return [
            make_sample(np.concatenate([prompt, answer]), np.concatenate([ignored, answer]))
            for answer in answers
        ]


def sequence_log_probs(
    token_losses: torch.Tensor, labels: torch.Tensor, cu_seq_lens: torch.Tensor
) -> torch.Tensor:
    """Sum the log-probabilities of each sequence's labels, for DPO-like losses.

    Args:
        token_losses: [1, T], each at the position of its label, as in `AttachedLoss.token_losses`.
        labels: [1, T], those of the batch.
        cu_seq_lens: [N + 1], the boundaries of the sequences.

    >>> losses, labels = torch.tensor([[0.0, 1, 2, 9, 4]]), torch.tensor([[-100, 6, 7, -100, 8]])
    >>> sequence_log_probs(losses, labels, torch.tensor([0, 3, 5])).tolist()
    [-3.0, -4.0]
    """
    label_losses = (token_losses * (labels != IGNORE_INDEX)).flatten()
    lengths = cu_seq_lens.diff().long()
    sequence_of_token = torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(label_losses)
    )
    return -label_losses.new_zeros(len(lengths)).index_add(0, sequence_of_token, label_losses)
