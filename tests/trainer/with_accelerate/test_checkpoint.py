"""Checkpoints of an Accelerate loop: models that load, complete or skipped, the newest kept."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from nopad.trainer import MANIFEST_NAME
from nopad.trainer.with_accelerate import (
    PackedAccelerateLoader,
    load_checkpoint,
    save_checkpoint,
)
from transformers import AutoModelForCausalLM


@pytest.fixture
def prepared():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_run.model())
    return accelerator, model


def first_weight(model) -> torch.Tensor:
    return next(model.parameters()).detach().clone()


def save(folder, prepared, step: int, keep: int | None = None) -> torch.Tensor:
    """Change the weights, and save them."""
    accelerator, model = prepared
    next(model.parameters()).data.fill_(step)
    save_checkpoint(accelerator, folder, step, model, keep=keep)
    return first_weight(model)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_a_model_and_is_loaded_with_its_step(tmp_path, prepared):
    saved = save(tmp_path, prepared, 5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    assert torch.equal(first_weight(loaded), saved)
    accelerator, model = prepared
    next(model.parameters()).data.zero_()
    assert load_checkpoint(accelerator, tmp_path) == 5
    assert torch.equal(first_weight(model), saved)


@pytest.mark.parametrize("damage", ["no manifest", "truncated"])
def test_an_interrupted_save_is_skipped_and_written_again(damage, tmp_path, prepared):
    saved = save(tmp_path, prepared, 5)
    save(tmp_path, prepared, 10)
    newest = tmp_path / "checkpoint-10"
    if damage == "no manifest":
        (newest / MANIFEST_NAME).unlink()
    else:
        (newest / "model.safetensors").write_bytes(b"cut short")
    (newest / "left over").touch()
    accelerator, model = prepared
    assert load_checkpoint(accelerator, tmp_path) == 5
    assert torch.equal(first_weight(model), saved)
    save(tmp_path, prepared, 10)
    assert load_checkpoint(accelerator, tmp_path) == 10 and not (newest / "left over").exists()


@pytest.mark.parametrize(("keep", "left"), [(None, [100, 15, 5]), (2, [100, 15]), (1, [100])])
def test_the_newest_checkpoints_are_kept(keep, left, tmp_path, prepared):
    for step in (5, 15, 100):
        save(tmp_path, prepared, step, keep)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_weights_that_are_not_finite_leave_no_checkpoint(tmp_path, prepared):
    accelerator, model = prepared
    PackedAccelerateLoader(accelerator, tiny_run.dataset(), continue_on_nan=True)
    save(tmp_path, prepared, 5)
    next(model.parameters()).data.fill_(torch.inf)
    save_checkpoint(accelerator, tmp_path, 10, model, keep=1)
    assert names(tmp_path) == ["checkpoint-5"]
