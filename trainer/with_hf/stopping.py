"""The HF Trainer stopped by a signal: after the step that is under way, with a checkpoint.

PackedTrainer(model, args, train_dataset=data, callbacks=[StopCallback()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..graceful_stop import StopRequest


class StopCallback(TrainerCallback):
    """On SIGTERM, SIGINT or SIGUSR1, save and stop after the step, all ranks together."""

    def __init__(self):
        self.request = StopRequest()  # now: a signal may come before the first step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.listen()  # the training before has given the signals back

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.request.agreed():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.release()
