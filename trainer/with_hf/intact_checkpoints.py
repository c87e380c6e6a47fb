"""`IntactCheckpointMixin`: HF checkpoints known to be complete; `StopCallback`: one on a signal.

The manifest of a checkpoint is written last, and older checkpoints are deleted after that: if a
save is interrupted, the one before it remains, and `resume_from_checkpoint=True` finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from ...runtime import barrier, rank
from ..checkpoint_manifest import (
    latest_intact_checkpoint,
    remove_manifest,
    rotate_checkpoints,
    write_manifest,
)
from ..graceful_stop import StopRequest

_Base = Trainer if TYPE_CHECKING else object


class IntactCheckpointMixin(_Base):
    """Mixin, listed before a Trainer, that resumes from its newest intact checkpoint."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resumed = resumed_folder(self.args, resume_from_checkpoint)
        try:
            return super().train(None if resumed is None else str(resumed), *args, **kwargs)
        finally:  # the trainer does not inform callbacks of exceptions
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StopCallback):
                    callback.request.release()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        folder = run_dir / f"checkpoint-{step}"
        if rank() == 0:
            remove_manifest(folder)
        barrier()
        self._save_data_state(folder)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        barrier()
        if rank() == 0:
            write_manifest(folder)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_dir, step, limit, keep=[Path(best)] if best else ())

    def _save_data_state(self, folder: Path) -> None:
        """Save the position in data that the Trainer does not count itself."""


def resumed_folder(args: Any, resume_from_checkpoint: Any) -> Path | None:
    """Return the checkpoint that `train` resumes from; for True, the newest intact one."""
    if resume_from_checkpoint is True:
        return latest_intact_checkpoint(Path(args.output_dir))
    return Path(resume_from_checkpoint) if resume_from_checkpoint else None


class StopCallback(TrainerCallback):
    """On SIGTERM, SIGINT or SIGUSR1, save and stop after the step, on all ranks.

    PackedTrainer(model, args, train_dataset=data, callbacks=[StopCallback()])
    """

    def __init__(self):
        self.request = StopRequest()  # here: a signal may arrive before the first step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.listen()  # again: an earlier training may have released the signals

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.request.should_stop():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.release()
