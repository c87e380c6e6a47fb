"""Stop the HF Trainer on a signal: after the current step, with a checkpoint.

PackedTrainer(model, args, train_dataset=data, callbacks=[StopCallback()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..graceful_stop import StopRequest


class StopCallback(TrainerCallback):
    """On SIGTERM, SIGINT or SIGUSR1, save and stop after the step, on all ranks."""

    def __init__(self):
        self.request = StopRequest()  # here: a signal may arrive before the first step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.listen()  # again: an earlier training may have released the signals

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.request.should_stop():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.release()
