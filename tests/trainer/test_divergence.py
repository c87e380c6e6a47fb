"""A training that diverges stops in every front end, and its last finite checkpoint stays."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from front_ends import Module
from nopad.runtime import HostCopy
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import FiniteCheck, NonFiniteError, check_weights
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from torch import nn
from transformers import TrainingArguments

GOOD_STEPS = 3


class Spoiled:
    """Spoils the loss of a step, or the weights after it, once GOOD_STEPS steps are done."""

    def __init__(self, what: str):
        self.what, self.forwards, self.has_labels = what, 0, False

    def attach(self, model) -> None:
        model.register_forward_pre_hook(self._note_labels, with_kwargs=True)
        model.get_input_embeddings().register_forward_hook(self._spoil)

    def _note_labels(self, module, args, kwargs):
        self.has_labels = kwargs.get("labels") is not None

    def _spoil(self, module, args, output):
        if not self.has_labels or not torch.is_grad_enabled():  # a check, or an evaluation
            return None
        self.forwards += 1
        if self.what == "loss" and self.forwards == GOOD_STEPS + 1:
            return output * math.nan
        if self.what == "weights" and self.forwards == GOOD_STEPS:
            output.register_hook(lambda gradient: gradient * math.inf)
        return None


def hf(model, folder: Path, continue_on_nan: bool) -> None:
    args = TrainingArguments(
        str(folder),
        max_steps=6,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
    )
    data = tiny_run.dataset(epochs=None)
    PackedTrainer(model, args, None, data, continue_on_nan=continue_on_nan).train()


def lightning(model, folder: Path, continue_on_nan: bool) -> None:
    packs = PackedDataModule(tiny_run.dataset(epochs=None))
    checkpoints = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        callbacks=[checkpoints, PackedCallback(packs, continue_on_nan=continue_on_nan)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(model), packs)


def accelerate(model, folder: Path, continue_on_nan: bool) -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    attach_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = tiny_run.dataset(epochs=None)
    loader = PackedAccelerateLoader(accelerator, data, continue_on_nan=continue_on_nan)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step, batch in enumerate(loader):
        if step == 6:
            break
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()


def saved_weights(folder: Path) -> list[list[torch.Tensor]]:
    from safetensors.torch import load_file

    files = [list(load_file(path).values()) for path in folder.rglob("*.safetensors")]
    archives = [torch.load(path, weights_only=True) for path in folder.rglob("*.ckpt")]
    return [*files, *(list(archive["state_dict"].values()) for archive in archives)]


FRONTS = {"hf": hf, "lightning": lightning, "accelerate": accelerate}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("what", ["loss", "weights"])
def test_a_run_that_diverges_stops_and_keeps_its_finite_checkpoint(front, what, tmp_path):
    model = tiny_run.model()
    Spoiled(what).attach(model)
    with pytest.raises(
        NonFiniteError, match=r"(loss is nan at|not finite after) (step|pack) \d.*: lower"
    ):
        FRONTS[front](model, tmp_path, continue_on_nan=False)
    saved = saved_weights(tmp_path)
    assert saved and all(tensor.isfinite().all() for tensors in saved for tensor in tensors)


@pytest.mark.parametrize("front", FRONTS)
def test_a_run_told_to_go_on_still_keeps_its_finite_checkpoint(front, tmp_path, capsys):
    model = tiny_run.model()
    Spoiled("weights").attach(model)
    FRONTS[front](model, tmp_path, continue_on_nan=True)
    saved = saved_weights(tmp_path)
    assert saved and all(tensor.isfinite().all() for tensors in saved for tensor in tensors)
    assert "no checkpoint: the weights are not finite after" in capsys.readouterr().out


def test_the_loss_of_the_log_is_that_of_the_run(tmp_path):
    args = TrainingArguments(
        str(tmp_path), max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    model = tiny_run.model()
    Spoiled("loss").attach(model)
    data = tiny_run.dataset(epochs=None)
    run = PackedTrainer(model, args, None, data, continue_on_nan=True)
    run.train()
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert all(map(math.isfinite, losses[:GOOD_STEPS])) and math.isnan(losses[GOOD_STEPS])


def test_weights_of_any_kind_are_looked_through():
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, torch.float64)]
    quantized = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    meta = nn.Parameter(torch.empty(2, device="meta"))
    parameters = nn.ParameterList([*weights, quantized, meta])
    check_weights(parameters, "step 1")
    check_weights(nn.Module(), "step 1")
    weights[0].data[1] = math.inf
    with pytest.raises(NonFiniteError, match="after step 7"):
        check_weights(parameters, "step 7")


def test_on_a_device_the_loss_is_read_a_step_later_or_before_a_save():
    check, loss = FiniteCheck(), torch.tensor(math.nan)
    check._pending = "step 4", HostCopy(loss)
    with pytest.raises(NonFiniteError, match="the loss is nan at step 4"):
        check.flush()
    check.flush()
