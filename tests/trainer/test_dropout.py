"""Dropout: resumed ≡ uninterrupted and with evaluations ≡ without, for a model that draws.

Every trainer sets the random numbers back when it resumes. Whatever draws from them afterwards, or
between steps, and does not in the other run, changes the dropout of all steps that follow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
import torch
import untouched
from hf_child import Watch

STEPS, SAVED = 5, 2


def hf(folder: Path, steps: int, resume: bool, **settings) -> list:
    from nopad.trainer.with_hf import PackedTrainer
    from transformers import TrainingArguments

    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        lr_scheduler_type="constant",
        **{"save_strategy": "steps", "save_steps": SAVED, **settings},
    )
    watch, held_out = Watch(), tiny_run.dataset(9)
    data = tiny_run.dataset(epochs=None)
    more = {"callbacks": [watch], "eval_dataset": held_out}
    run = PackedTrainer(untouched.model(), args, None, data, **more)
    run.train(resume_from_checkpoint=resume)
    return [*watch.losses, tiny_run.digest(run.model)]


def accelerate(folder: Path, steps: int, resume: bool) -> list:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from nopad.trainer.loss import attach_loss
    from nopad.trainer.with_accelerate import AcceleratePacks

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = untouched.model()
    attach_loss(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = AcceleratePacks(accelerator, tiny_run.dataset(epochs=None))
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for _, batch in zip(range(SAVED * resume, steps), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(folder))
    return [*losses, tiny_run.digest(accelerator.unwrap_model(model))]


RESUMED = {"hf": hf, "accelerate": accelerate}


@pytest.mark.parametrize("trainer", RESUMED)
def test_a_resumed_run_drops_what_the_uninterrupted_one_drops(trainer, tmp_path):
    run = RESUMED[trainer]
    *losses, weights = run(tmp_path / "whole", STEPS, False)
    *first, _ = run(tmp_path / "parts", SAVED, False)
    *second, resumed = run(tmp_path / "parts", STEPS, True)
    assert first + second == losses
    assert resumed == weights


def test_evaluations_by_loss_leave_the_dropout_of_the_training_alone(tmp_path):
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    without = hf(tmp_path, STEPS, False, save_strategy="no")
    assert hf(tmp_path, STEPS, False, save_strategy="no", **evaluating) == without
