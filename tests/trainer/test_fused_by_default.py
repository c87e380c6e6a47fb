"""Every front end fuses the layers and attaches the loss by itself, unless it is told not to."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from front_ends import Module, pl
from nopad.trainer.fused import FusedLayers
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader, loader
from nopad.trainer.with_hf import PackedTrainer, trainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule, packed_callback
from transformers import TrainingArguments


def hf(model, folder, **options) -> None:
    args = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    PackedTrainer(model, args, train_dataset=tiny_run.dataset(), **options).train()


def accelerate(model, folder, **options) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    batch = next(iter(PackedAccelerateLoader(accelerator, tiny_run.dataset(), **options)))
    accelerator.backward(model(**batch).loss)


def lightning(model, folder, **options) -> None:
    data = PackedDataModule(tiny_run.dataset())
    settings = {"accelerator": "cpu", "max_steps": 1, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    callback = PackedCallback(data, **options)
    pl.Trainer(**settings, **quiet, callbacks=[callback]).fit(Module(model), data)


FRONT_ENDS = {
    "hf": (hf, trainer),
    "accelerate": (accelerate, loader),
    "lightning": (lightning, packed_callback),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_layers_are_fused_and_the_banner_names_them(name, monkeypatch, tmp_path, capsys):
    train, module = FRONT_ENDS[name]
    models = []

    def fuse(model, device):
        models.append(model)
        fused = FusedLayers()
        fused.add_name("LlamaMLP")
        return fused

    monkeypatch.setattr(module, "fuse_layers", fuse)
    model = tiny_run.model()
    train(model, tmp_path)
    assert models == [model] and model.nopad_loss.fused
    line = "nopad: loss without logits, fused kernels for LlamaMLP"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    model = tiny_run.model()
    train(model, tmp_path, fused=False)
    assert len(models) == 1, "told not to"
    assert "no fused kernels" in capsys.readouterr().out
    assert model.nopad_loss.fused, "the loss is another matter"


def test_a_loss_that_was_attached_keeps_its_options():
    model = tiny_run.model()
    attached = attach_loss(model, z_loss=0.5)
    accelerate(model, None)
    assert model.nopad_loss is attached


def test_a_prepared_model_keeps_its_forward_when_the_loss_is_detached():
    AcceleratorState._reset_state()
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(tiny_run.model())
    prepared = model.forward
    attach_loss(model)
    model.nopad_loss.detach()
    assert model.forward == prepared
    AcceleratorState._reset_state()


@pytest.mark.parametrize("name", ["num_items_in_batch", "loss_weights"])
def test_a_count_that_was_rounded_is_refused(name):
    model, pack = tiny_run.model(), tiny_run.packs(tiny_run.dataset(), 1)[0]
    attach_loss(model)
    batch = tiny_run.collate(pack)
    rounded = torch.ones_like(batch["labels"], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"{name} was cast to .*cast_forward_inputs"):
        model(**batch, **{name: rounded})
