"""Totals in Lightning's progress bars, which it cannot know: epochs differ in their packs."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from ..data.loader import EvaluationLoader, PackedLoader


def set_train_total(trainer: Any, loader: PackedLoader, batch_idx: int) -> None:
    """Show how many batches the current epoch has, or are left until `max_steps`.

    batch_idx: the next batch of the epoch.
    """
    if trainer.num_training_batches != math.inf:
        return  # limit_train_batches
    totals = []
    if trainer.max_steps >= 0:
        steps = trainer.max_steps - trainer.global_step
        totals.append(batch_idx + steps * loader.accumulation_steps)
    with suppress(TypeError):  # a stream, or data without end
        totals.append(loader.pass_length())
    _set_total(trainer, "train_progress_bar", min(totals, default=None))


def set_validation_total(trainer: Any, loader: EvaluationLoader) -> None:
    """Show how many batches a validation has."""
    _set_total(trainer, "val_progress_bar", loader.packs)


def _set_total(trainer: Any, name: str, total: int | None) -> None:
    with suppress(AssertionError, TypeError):  # Lightning's property, of a bar that is not there
        bar: Any = getattr(trainer.progress_bar_callback, name, None)
        if bar is not None:
            bar.total = total
