"""Folders that `from_pretrained` loads, of models and adapters."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from char_words import char_tokenizer
from front_ends import Module
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.tensor([[1, 2, 3, 4]])


def trained(model) -> pl.Trainer:
    packs = PackedDataModule(tiny_run.dataset(9))
    quiet = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, **quiet,
        callbacks=[PackedCallback(packs, check=False)],
    )  # fmt: skip
    trainer.fit(Module(model), packs)
    return trainer


def test_the_model_and_its_tokenizer_are_loaded_from_the_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_run.model(tie_word_embeddings=True)
    save_pretrained(trained(model), tmp_path, char_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc")["input_ids"] == [2, 3, 4]


def test_of_an_adapted_model_the_adapter_is_saved(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tiny_run.model().save_pretrained(tmp_path / "base")
    base = type(tiny_run.model()).from_pretrained(tmp_path / "base", attn_implementation="nopad")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    save_pretrained(trained(model), tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.allclose(loaded(IDS).logits, model.eval()(IDS).logits, atol=1e-6)
