"""Keep Lightning from replacing a checkpoint by one with weights that are not finite."""

from __future__ import annotations

from functools import wraps
from typing import Any

from ..monitoring.finite_check import FiniteCheck
from .hooks import pl

MARK = "nopad_finite_check"
"""Attribute of a trainer whose saves are guarded: the check that guards them."""


def guard_saves(trainer: pl.Trainer, check: FiniteCheck) -> None:
    """Have a trainer save, and delete older checkpoints, only while its weights are finite.

    Callbacks cannot do it: Lightning calls them only for some saves, and they cannot omit one.
    """
    guarded: Any = trainer
    if hasattr(guarded, MARK):
        setattr(guarded, MARK, check)
        return
    setattr(guarded, MARK, check)
    save, strategy, is_finite = trainer.save_checkpoint, trainer.strategy, True
    remove = strategy.remove_checkpoint

    @wraps(save)
    def save_finite(*args: Any, **kwargs: Any) -> None:
        nonlocal is_finite
        check: FiniteCheck = getattr(guarded, MARK)
        is_finite = check.may_save(trainer.lightning_module, f"step {trainer.global_step}")
        if is_finite:
            save(*args, **kwargs)

    @wraps(remove)
    def remove_replaced(*args: Any, **kwargs: Any) -> None:
        if is_finite:  # otherwise what it would be replaced by was not saved
            remove(*args, **kwargs)

    trainer.save_checkpoint, strategy.remove_checkpoint = save_finite, remove_replaced
