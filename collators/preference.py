"""`PreferenceCollator`: chosen and rejected answers in one packed row, each its own sequence.

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
from ..packing.encoding import Encoder
from ..packing.planning import check_ints
from ..packing.sources import drop_null_fields
from .packed import PackedCollator

ID_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
ANSWER_COLUMNS = ("chosen", "rejected")


class PreferenceBatch(dict):
    """A batch of packed pairs; it raises in trainers that expect padded pairs."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"PreferenceCollator packs pairs and has no {name!r}, unlike padded pairs: omit "
            "data_collator= in TRL's DPOTrainer, or compute the loss of packed pairs with "
            "nopad.preference_log_probs"
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

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        add_eos: bool | int = True,
        max_length: int | None = None,
        **options: Any,
    ):
        """Choose how pairs are read and cut.

        Args:
            tokenizer: for pairs of text or messages: `prompt`, `chosen` and `rejected`, or two
                conversations `chosen` and `rejected` that begin alike. Pairs of ready ids
                (`prompt_ids`, `chosen_ids`, `rejected_ids`) need none.
            add_eos: end answers of text with the tokenizer's eos (True), with this id, or not at
                all (False). Messages end as the chat template says; ready ids stay unchanged.
            max_length: the longest sequence. In a longer pair, first the end of an answer is cut,
                then the beginning of the prompt, equally for both answers; `num_cut` counts the
                pair. None: nothing is cut.
            options: options of `PackedCollator`, except for fixed shapes, since pairs vary in
                length.
        """
        if max_length is not None and check_ints(max_length=max_length)[0] < 2:
            raise ValueError(f"max_length={max_length}: prompt and answer need at least one token")
        for name in ("pad_to_budget", "fixed_sequences", "stack"):
            if options.get(name):
                raise ValueError(f"{name}={options[name]}: pairs have no budget to pad to")
        if tokenizer is None and add_eos is not True:
            raise ValueError("add_eos= is for pairs of text: pass tokenizer= too")
        self.max_length = max_length
        self.num_cut = 0
        """Pairs cut to `max_length` so far; workers of a DataLoader count in their own copies."""
        self._encoder = None if tokenizer is None else Encoder(tokenizer, add_eos=add_eos)
        self._collator = PackedCollator(**options)

    def __call__(self, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [sample for pair in pairs for sample in self._cut(self._answers(pair))]
        batch = PreferenceBatch(self._collator(samples))
        batch["is_chosen"] = torch.arange(len(samples)) % 2 == 0
        return batch

    def _answers(self, pair: Mapping[str, Any]) -> list[Sample]:
        """Return the chosen and the rejected answer, each after their common prompt."""
        columns = set(pair) if isinstance(pair, Mapping) else set[str]()
        if columns.issuperset(ID_COLUMNS):
            prompt, *answers = (validate_token_ids(pair[name], name) for name in ID_COLUMNS)
            ignored = np.full(len(prompt), IGNORE_INDEX)
            return [
                make_sample(np.concatenate([prompt, answer]), np.concatenate([ignored, answer]))
                for answer in answers
            ]
        if not columns.issuperset(ANSWER_COLUMNS):
            got = list(pair) if isinstance(pair, Mapping) else type(pair).__name__
            raise ValueError(
                "a pair needs prompt_ids, chosen_ids and rejected_ids, or prompt, chosen and "
                f"rejected, got {got}"
            )
        if self._encoder is None:
            raise ValueError("a pair of text needs a tokenizer: PreferenceCollator(tokenizer=)")
        encoded = self._encoder.encode(_prompts_and_completions(pair))
        for sample in encoded:
            if isinstance(sample, ValueError):
                raise sample
        return encoded  # pyright: ignore[reportReturnType]

    def _cut(self, answers: list[Sample]) -> list[Sample]:
        """Cut both answers to `max_length`."""
        if self.max_length is None:
            return answers
        self.num_cut += max(map(len, answers)) > self.max_length
        firsts = [int(np.argmax(sample.labels != IGNORE_INDEX)) for sample in answers]
        room = self.max_length - 1
        longest = max(
            min(len(sample) - first, room) for sample, first in zip(answers, firsts, strict=True)
        )
        kept = [
            slice(max(0, first - (self.max_length - longest)), first + room) for first in firsts
        ]
        return [
            make_sample(sample.tokens[part], sample.labels[part])
            for sample, part in zip(answers, kept, strict=True)
        ]


def _prompts_and_completions(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pair as two rows of a prompt and a completion.

    >>> turn = {"role": "user", "content": "?"}
    >>> _prompts_and_completions({"chosen": [turn, {"role": "a"}], "rejected": [turn, {}]})[0]
    {'prompt': [{'role': 'user', 'content': '?'}], 'completion': [{'role': 'a'}]}
    """
    chosen, rejected = (pair[name] for name in ANSWER_COLUMNS)
    prompt, are_chats = pair.get("prompt"), isinstance(chosen, list) and isinstance(rejected, list)
    if prompt is None and not are_chats:
        raise ValueError("a pair without a prompt needs messages in chosen and rejected")
    if are_chats and not isinstance(prompt, list):  # text repeats the first turn, as UltraFeedback
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    tools = {"tools": pair["tools"]} if pair.get("tools") is not None else {}
    rows = [{"prompt": prompt, "completion": answer, **tools} for answer in (chosen, rejected)]
    return [drop_null_fields(row) for row in rows]


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
