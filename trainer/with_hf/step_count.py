"""Count the optimizer steps of `num_train_epochs` from the packs that are left to train.

    packs of the epochs ─ packs trained ─▶ packs left ─▶ rounds of all ranks ─▶ steps left
    last step = step of the checkpoint + steps left

A resumed run may have other ranks or another accumulation than before, so the steps that it took
say nothing about the packs that are left.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ...packing import PackedDataset
from ..monitoring.preflight import print_banner


def set_epochs(args: TrainingArguments, data: PackedDataset) -> int:
    """Let the data have `num_train_epochs` epochs, rewind it, and return the steps of all."""
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
