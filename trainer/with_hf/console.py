"""What the HF Trainer shows: short lines on the terminal, and all values in the trackers.

The names are those of the other front ends: train/loss, pack/fill, eval/...
"""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

SHOWN = ("pack/fill", "pack/tokens_per_second", "pack/mfu")
"""The rates of packs that the terminal shows."""


class PackTag(str):
    """`pack/fill`, also in trackers, whose callbacks put `train/` before every name.

    >>> "train/" + PackTag("pack/fill"), "train/" + "loss"
    ('pack/fill', 'train/loss')
    """

    __slots__ = ()

    def __radd__(self, other: str) -> str:
        return str(self)


class ShortProgress(ProgressCallback):
    """The progress bar, with few rates of packs in a line."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps  # a stream may end before
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=shorten(logs), **kwargs)


class ShortPrinter(PrinterCallback):
    """The printed lines, with few rates of packs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=shorten(logs), **kwargs)


def shorten(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a line: those of the training, and the main rates of packs."""
    return {n: v for n, v in logs.items() if not n.startswith("pack/") or n in SHOWN}


def shorten_lines(trainer: Trainer) -> None:
    """Replace the callbacks that write to the terminal."""
    for stock, short in ((ProgressCallback, ShortProgress), (PrinterCallback, ShortPrinter)):
        callbacks = trainer.callback_handler.callbacks
        trainer.callback_handler.callbacks = [
            short() if type(callback) is stock else callback for callback in callbacks
        ]


def prints_logs(trainer: Trainer) -> bool:
    """Return whether what is logged now appears on the terminal."""
    return any(
        isinstance(callback, PrinterCallback)
        or (isinstance(callback, ProgressCallback) and callback.training_bar is not None)
        for callback in trainer.callback_handler.callbacks
    )
