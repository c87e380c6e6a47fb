"""Dropout: resumed ≡ uninterrupted and with evaluations ≡ without, for a model that draws.

Every trainer sets the random numbers back when it resumes. Whatever draws from them afterwards, or
between steps, and does not in the other run, changes the dropout of all steps that follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

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
    from nopad.trainer.with_accelerate import PackedAccelerateLoader

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = untouched.model()
    attach_loss(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(epochs=None))
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


def lightning(folder: Path, steps: int, resume: bool) -> list:
    import lightning.pytorch as pl
    from front_ends import Module
    from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

    class Noting(Module):
        losses: ClassVar[list[float]] = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.item())
            return loss

    module, packs = Noting(untouched.model()), PackedDataModule(tiny_run.dataset(epochs=None))
    quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    quiet |= {"accelerator": "cpu", "devices": 1, "logger": False}
    trainer = pl.Trainer(max_steps=steps, callbacks=[PackedCallback(packs)], **quiet)
    file = folder / "last.ckpt"
    trainer.fit(module, packs, ckpt_path=file if resume else None, weights_only=True)
    trainer.save_checkpoint(file)
    return [*module.losses, tiny_run.digest(module)]


RESUMED = {"hf": hf, "accelerate": accelerate, "lightning": lightning}


@pytest.mark.parametrize("trainer", RESUMED)
def test_a_resumed_run_drops_what_the_uninterrupted_one_drops(trainer, tmp_path, capsys):
    run = RESUMED[trainer]
    *losses, weights = run(tmp_path / "whole", STEPS, False)
    *first, _ = run(tmp_path / "parts", SAVED, False)
    *second, resumed = run(tmp_path / "parts", STEPS, True)
    assert first + second == losses
    assert resumed == weights
    names = {"hf": "checkpoint-2, pack 4", "lightning": "last.ckpt, pack 2"}
    line = f"nopad: resumed from {names.get(trainer, 'parts, pack 2')}\n"
    assert capsys.readouterr().out.count(line) == 1


def test_evaluations_by_loss_leave_the_dropout_of_the_training_alone(tmp_path):
    eval_mode = {"eval_strategy": "steps", "eval_steps": 2}
    without = hf(tmp_path, STEPS, False, save_strategy="no")
    assert hf(tmp_path, STEPS, False, save_strategy="no", **eval_mode) == without


def test_other_ranks_than_those_that_saved_draw_their_own_numbers():
    from nopad.runtime import gather_rng_states, load_rng_states

    host = torch.device("cpu")
    saved, drawn = gather_rng_states(host), torch.rand(3)
    here = torch.get_rng_state()
    load_rng_states([*saved, *saved], host)
    assert torch.equal(torch.get_rng_state(), here)
    load_rng_states(saved, host)
    assert torch.equal(torch.rand(3), drawn)
