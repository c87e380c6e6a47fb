"""Lightning stopped by a signal: after the step that is under way, with a checkpoint to go on from.

Trainer(callbacks=[PackedCallback(data), StopCallback(Path("out/last.ckpt"))], ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..graceful_stop import StopRequest
from .packs import AfterStep, pl


class StopCallback(AfterStep):
    """On SIGTERM, SIGINT or SIGUSR1, save and stop after the step, all ranks together."""

    def __init__(self, path: Path):
        """path: the checkpoint to write then."""
        self.path = path
        self.request = StopRequest()  # now: a signal may come before the first step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Its own handler talks to other ranks from inside a signal, and leaves without saving.
        connector: Any = getattr(trainer, "_signal_connector", None)
        if connector is not None:
            connector.register_signal_handlers = lambda: None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.request.listen()

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.request.agreed() and not trainer.should_stop:
            trainer.save_checkpoint(self.path, weights_only=False)
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.request.release()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.request.release()
