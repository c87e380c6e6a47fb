"""Evaluation sets of any kind as packs, with the settings of the training data.

The stock loader would give batches without labels, and so no loss, for a set of token ids only, and
would pad the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...packing import PackedDataset
from ..data.loader import Batch, EvaluationLoader

COMMON = (
    "budget",
    "overflow",
    "max_length",
    "pad_to_multiple_of",
    "pad_token_id",
    "continue_positions",
    "text_column",
    "on_error",
)
"""Settings of the training data that hold for its evaluation sets."""


def pack_like(train: PackedDataset, source: Any, tokenizer: Any = None) -> PackedDataset:
    """Pack a source, in its order, with the settings of the training data.

    tokenizer: for rows of text; rows of token ids need none.
    """
    if isinstance(source, PackedDataset):
        return source
    eos = train.settings["add_eos"]
    return PackedDataset(
        source,
        tokenizer=tokenizer if callable(tokenizer) else None,
        add_eos=False if eos is None else eos,
        shuffle=False,
        pretokenize=True,
        rank=train.rank,
        world_size=train.world_size,
        **{name: train.settings[name] for name in COMMON},
    )


class TrainerEvaluationLoader(EvaluationLoader):
    """Tells the accelerator which batch is the last one, as its own loaders do.

    With `batch_eval_metrics` the trainer computes its metrics then.
    """

    gradient_state: Any = None
    """The accelerator's, which knows the loaders that are being read."""
    end_of_dataloader = False
    remainder = -1
    """Accelerate drops no rows at the end."""

    def __iter__(self) -> Iterator[Batch]:
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for number, batch in enumerate(super().__iter__(), start=1):
                self.end_of_dataloader = number == self.packs
                yield batch
        finally:
            self.gradient_state._remove_dataloader(self)
