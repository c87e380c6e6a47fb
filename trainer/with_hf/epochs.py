"""The epochs of a training on packs: how many steps they have, and when each of them ends.

    packs of the epochs ─ packs trained ─▶ packs left ─▶ rounds of all ranks ─▶ steps left
    last step = step of the checkpoint + steps left

A resumed run may have a different number of ranks or accumulation steps, so the packs that are left
cannot be computed from the steps taken.

    pass        ├── epoch 0 ──┼── epoch 1 ──┼── epoch 2 ──┤
    stock loop  on_epoch_begin                    on_epoch_end
    here        on_epoch_end, evaluate, save, log, on_epoch_begin after the steps between

The stock loop treats a pass as one epoch, so `EpochCallback` detects the ends of epochs. A step may
train the last packs of an epoch and the first of the next: the epoch ends after it. A callback that
ends an epoch (`control.should_epoch_stop`) skips its remaining packs. The epochs of a stream are
not known, so `state.epoch` is the fraction of `max_steps`. The training ends with the pass of a
stream, even before `max_steps`, which the Trainer requires for such data.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ...packing import PackedDataset
from ..banner import print_banner
from ..monitoring.stream_end import is_stream_end, print_stream_end, print_unread_stream


def set_epochs(args: TrainingArguments, data: PackedDataset) -> int:
    """Set the data's epochs to `num_train_epochs`, rewind it, and count the steps."""
    if not 0 < args.num_train_epochs < math.inf:
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs}: it must be finite and above 0; or pass "
            "max_steps="
        )
    if data.lengths is None:
        raise ValueError(
            "the packs of a stream cannot be counted before it is read: pass max_steps=, the "
            "number of steps to train, in the arguments"
        )
    data.epochs = math.ceil(args.num_train_epochs)
    data.rewind()
    steps = steps_left(args, data)
    if not steps:
        raise ValueError("the data has no packs: it is empty, or all of it was skipped or dropped")
    return steps


def count_again(args: TrainingArguments, data: PackedDataset) -> int:
    """Count the steps from the data's position: since `set_epochs` the arguments may have changed.

    Trials of a hyperparameter search change them, as does `accelerator_config`.
    """
    data.start_next_pass()
    state, data.epochs = data.state_dict(), math.ceil(args.num_train_epochs)
    data.load_state_dict(state)
    return steps_left(args, data)


def last_step(args: TrainingArguments, data: PackedDataset, checkpoint: Path) -> int:
    """Return the step after which a resumed run has trained all packs of its epochs.

    data: with the position of the checkpoint.
    """
    saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    left = _packs_left(args, data, data.state_dict())
    step = saved.global_step + _steps(left, args, data)
    if step != saved.max_steps:
        print_banner([
            f"{left:,} packs are left: training and its schedule end at step {step:,}, "
            f"not {saved.max_steps:,}"
        ])  # fmt: skip
    return step


def steps_left(args: TrainingArguments, data: PackedDataset) -> int:
    """Count the steps from the position of the data to the end of its epochs."""
    return _steps(_packs_left(args, data, data.state_dict()), args, data)


def _packs_left(args: TrainingArguments, data: PackedDataset, state: dict[str, Any]) -> int:
    """Count the packs from a state to the end of its pass; its last epoch may be a fraction."""
    position = state["position"]
    if state["finished"]:
        return 0
    first = position["end_epoch"] - data.epochs  # not 0 in a second training
    epochs = first + args.num_train_epochs
    last, end = math.ceil(epochs) - 1, position["epoch_start"]
    for epoch in range(position["epoch"], last + 1):
        share = epochs - last if epoch == last else 1
        end += math.ceil(share * data.count(epoch))
    if data.max_packs is not None:
        end = min(end, data.max_packs)
    return max(0, end - position["index"])


def _steps(packs: int, args: TrainingArguments, data: PackedDataset) -> int:
    """Count steps: each takes `gradient_accumulation_steps` packs on every data-parallel rank."""
    data_size = data.ranks()[1]
    return math.ceil(math.ceil(packs / data_size) / args.gradient_accumulation_steps)


class EpochCallback(TrainerCallback):
    """Keep `state.epoch` right, and notice the ends of epochs; the first callback of a trainer."""

    def __init__(self, trainer: Any, ends_with_stream: bool):
        """Take the trainer.

        ends_with_stream: end the training after the epochs of a stream, or its `max_packs`.
        """
        self._trainer, self._ends_with_stream = trainer, ends_with_stream
        self._ended = 0
        self._ended_epoch = False
        """Whether the last step that was trained ended an epoch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = math.floor(self._epochs_done() or 0)
        if self._trainer._resume_from is not None:  # another `train()` starts the next pass
            self._end_with_stream(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_with_stream(state)
        done, self._ended_epoch = self._epochs_done(), self.ends_epoch()
        # The stock loop would count from the start of a resumed run.
        state.epoch = state.global_step / state.max_steps if done is None else done

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, loader = self._trainer, self._trainer._loader
        if not control.should_epoch_stop or control.should_training_stop:
            return
        if not trainer.accelerator.sync_gradients:
            raise ValueError(
                "control.should_epoch_stop was set inside an optimizer step, whose packs would be "
                "lost: set it in on_step_end"
            )
        if self._ended_epoch:
            return
        if self._epochs_done() is None:
            raise ValueError(
                "control.should_epoch_stop: the epochs of a stream have no known end; set "
                "should_training_stop, or pretokenize=True in the PackedDataset"
            )
        loader.skip_epoch()
        self._ended, trainer._trained_state = math.floor(self._epochs_done() or 0), loader.state()
        if trainer._counts_epochs():
            state.max_steps = state.global_step + steps_left(args, loader.dataset)
            control.should_training_stop = state.global_step == state.max_steps

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader = self._trainer._loader
        if not self._ends_with_stream or loader is None:
            return
        if state.global_step >= state.max_steps:
            print_unread_stream(loader.dataset, loader.state(), state.max_steps)

    def _end_with_stream(self, state: Any) -> None:
        """Lower `max_steps` to the current step when the pass of a stream is over."""
        loader = self._trainer._loader
        if not self._ends_with_stream or loader is None or state.global_step >= state.max_steps:
            return
        if is_stream_end(loader.dataset, loader.state()):
            print_stream_end(state.global_step, state.max_steps)
            state.max_steps = state.global_step

    def ends_within_pass(self) -> bool:
        """Return, once, whether the last step ended an epoch and the stock loop continues."""
        before, self._ended = self._ended, math.floor(self._epochs_done() or 0)
        state, control = self._trainer.state, self._trainer.control
        is_stopping = control.should_training_stop or control.should_epoch_stop
        if self._ended == before or is_stopping or state.global_step >= state.max_steps:
            return False
        return not self._trainer._loader.state()["finished"]

    def ends_epoch(self) -> bool:
        """Return whether the current step, whose packs were read, is the last of an epoch."""
        loader = self._trainer._loader
        if loader is None:
            return False
        done = self._epochs_done()
        if done is None:
            return is_stream_end(loader.dataset, loader.state())
        return math.floor(done) != self._ended

    def _epochs_done(self) -> float | None:
        """Return how many epochs of the data were trained; None for a stream of unknown length."""
        loader = self._trainer._loader
        return None if loader is None else loader.epochs_done()
