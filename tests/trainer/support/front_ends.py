"""The first step of a run in each front end, in this process: what the same promise is asked of."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from hf_child import Watch
from nopad.packing import PackedDataset
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from transformers import TrainingArguments
from trl_run import trl_trainer

Gradient = dict[str, torch.Tensor]


def accelerate(
    model, data: PackedDataset, folder: Path, accumulation: int = 2, *, collator=None
) -> Gradient:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    attach_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in PackedAccelerateLoader(accelerator, data, collator):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                found = gradient(accelerator.unwrap_model(model))
                optimizer.step()
                return found
    raise AssertionError("the data ended before the first step")


def hf(
    model, data: PackedDataset, folder: Path, accumulation: int = 2, *, collator=None, **settings
) -> Gradient:
    args = TrainingArguments(
        str(folder),
        max_steps=1,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **{"use_cpu": True, **settings},
    )
    watch = Watch()
    PackedTrainer(model, args, collator, data, callbacks=[watch]).train()
    return watch.gradient


class Module(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer):
        self.seen = gradient(self.model)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noting(Module):
    """Notes the tokens of every batch that it trained on."""

    def __init__(self):
        super().__init__(tiny_run.model())
        self.batches: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch["input_ids"].flatten().tolist())
        return super().training_step(batch, batch_idx)


def lightning(
    model,
    data: PackedDataset,
    folder: Path,
    accumulation: int = 2,
    *callbacks,
    collator=None,
    loss=None,
    **settings,
) -> Gradient:
    packs, module = PackedDataModule(data, collator=collator), Module(model)
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        accumulate_grad_batches=accumulation,
        callbacks=[PackedCallback(packs, **loss or {}), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    ).fit(module, packs)
    return module.seen


def gradient(model) -> Gradient:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def trl(model, data: PackedDataset, folder: Path) -> Gradient:
    watch = Watch()
    trl_trainer(folder, model, data, {"callbacks": [watch]}).train()
    return watch.gradient


FIRST_STEP = {"accelerate": accelerate, "hf": hf, "lightning": lightning}
FIRST_STEP_OF_LM = {**FIRST_STEP, "trl": trl}
"""TRL's SFTTrainer trains causal LMs only."""
