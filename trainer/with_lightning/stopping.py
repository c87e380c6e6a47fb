"""Stop Lightning on a signal: after the current step, with a checkpoint to resume from.

Trainer(callbacks=[PackedCallback(data), StopCallback(Path("out/last.ckpt"))], ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..graceful_stop import StopRequest
from .hooks import AfterStep, pl


class StopCallback(AfterStep):
    """On SIGTERM, SIGINT or SIGUSR1, save and stop after the step, on all ranks."""

    def __init__(self, path: Path):
        """Listen to signals from now on.

        Args:
            path: the checkpoint to write on a signal.
        """
        self.path = path
        self.request = StopRequest()  # here: a signal may arrive before the first step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning's handlers communicate with other ranks inside the signal, and exit unsaved.
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.request.listen()

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.request.should_stop() and not trainer.should_stop:
            trainer.save_checkpoint(self.path, weights_only=False)
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.request.release()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.request.release()
