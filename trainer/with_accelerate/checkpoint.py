"""Save and load checkpoints of an Accelerate loop; incomplete ones are never loaded.

    save_checkpoint(accelerator, "out", step, model, tokenizer, keep=2)    # out/checkpoint-STEP
    step = load_checkpoint(accelerator, "out")                             # the newest intact one

The manifest is written last, so that a resume skips a checkpoint whose save was interrupted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..checkpoint_manifest import (
    PREFIX,
    latest_intact_checkpoint,
    rotate_checkpoints,
    write_manifest,
)


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path | str,
    step: int,
    model: Any,
    tokenizer: Any = None,
    *,
    keep: int | None = None,
) -> None:
    """Save the state of a run, in a form that `from_pretrained` also loads; call it on every rank.

    Args:
        accelerator: the one that prepared the model.
        folder: folder of the run; the checkpoint is `checkpoint-STEP` in it.
        step: number of optimizer steps so far.
        model: the prepared model; its config is saved with the weights.
        tokenizer: a tokenizer to save with the model.
        keep: number of newest checkpoints to keep; default: all.
    """
    path = Path(folder) / f"{PREFIX}{step}"
    if accelerator.is_main_process:
        shutil.rmtree(path, ignore_errors=True)  # what an interrupted save has left
    accelerator.wait_for_everyone()
    accelerator.save_state(str(path))
    if accelerator.is_main_process and path.exists():  # weights that are not finite are not saved
        accelerator.unwrap_model(model).config.save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        write_manifest(path)
        rotate_checkpoints(Path(folder), step, keep)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, folder: Path | str) -> int:
    """Load the newest intact checkpoint of a run, on every rank; return its step.

    Args:
        accelerator: the one that prepared model, optimizer and schedule.
        folder: the folder passed to `save_checkpoint`.
    """
    path = latest_intact_checkpoint(Path(folder))
    accelerator.load_state(str(path))
    return int(path.name.removeprefix(PREFIX))
