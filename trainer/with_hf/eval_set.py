"""The loader of evaluation sets: packs, whatever the set is.

The stock loader would give batches without labels, and so no loss, for a set of token ids only, and
would pad the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..data.loader import Batch, EvaluationLoader


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
