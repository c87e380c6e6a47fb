"""Several language models in one Lightning module: each that sees packs is checked."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule, save_pretrained
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Distilled(pl.LightningModule):
    """A frozen teacher, declared first, and a student in eval mode, as `from_pretrained` has it."""

    def __init__(self, teacher: Any, student: Any, teacher_sees_packs: bool = True):
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False).eval(), student.eval()
        self.teacher_sees_packs = teacher_sees_packs

    def training_step(self, batch, _):
        self.modes = self.teacher.training, self.student.training
        if self.teacher_sees_packs:
            with torch.no_grad():
                assert self.teacher(**batch).logits is not None
        return self.student(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def fit(module: pl.LightningModule) -> pl.Trainer:
    packs = PackedDataModule(tiny_run.dataset())
    quiet: dict[str, Any] = {f"enable_{name}": False for name in ("progress_bar", "model_summary")}
    quiet |= {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(callbacks=[PackedCallback(packs)], max_steps=1, **quiet)
    trainer.fit(module, packs)
    return trainer


def mamba() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": tiny_run.VOCABULARY, "hidden_size": 32, "state_size": 4}
    return MambaForCausalLM(MambaConfig(num_hidden_layers=2, **size))


def test_the_trained_model_is_put_into_training_mode(capsys):
    module = Distilled(tiny_run.model(), tiny_run.model())
    fit(module)
    assert module.modes == (False, True)
    assert hasattr(module.student, "nopad_loss") and not hasattr(module.teacher, "nopad_loss")
    assert capsys.readouterr().out.count("leak check 0.0") == 2


@pytest.mark.parametrize("leaks", ["teacher", "student"])
def test_a_model_that_leaks_is_refused_wherever_it_is_declared(leaks, monkeypatch):
    monkeypatch.setattr("nopad.trainer.loss.document_boundaries.stateful_modules", lambda model: [])
    models = {"teacher": tiny_run.model(), "student": tiny_run.model(), leaks: mamba()}
    with pytest.raises(ValueError, match="mamba with attn_implementation="):
        fit(Distilled(**models))


def test_a_frozen_model_that_sees_no_packs_is_not_refused():
    trainer = fit(Distilled(mamba(), tiny_run.model(), teacher_sees_packs=False))
    assert trainer.global_step == 1


def test_the_model_that_is_trained_is_exported(tmp_path):
    module = Distilled(tiny_run.model(), tiny_run.model())
    trainer = fit(module)
    save_pretrained(trainer, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert tiny_run.digest(saved) == tiny_run.digest(module.student)
    assert tiny_run.digest(saved) != tiny_run.digest(module.teacher)
    module.teacher.requires_grad_(True)
    with pytest.raises(ValueError, match="teacher, student are all trained"):
        save_pretrained(trainer, tmp_path / "two")
