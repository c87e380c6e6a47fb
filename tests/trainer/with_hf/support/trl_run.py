"""TRL's SFTTrainer on packs."""

from __future__ import annotations

from pathlib import Path

import pytest
from nopad.packing import PackedDataset


def trl_trainer(folder: Path, model, data: PackedDataset, more=None, **settings):
    """TRL's SFTTrainer on packs; `more` is the trainer's, the settings are its arguments'."""
    sft = pytest.importorskip("trl", reason="the trainer is TRL's")
    from nopad.trainer.with_hf import PackedSFTTrainer
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    usual = {"max_steps": 1, "gradient_accumulation_steps": 2, "use_cpu": True, "bf16": False}
    quiet = {"report_to": [], "save_strategy": "no", "max_grad_norm": 0, "disable_tqdm": True}
    args = sft.SFTConfig(str(folder), **{**usual, **quiet, **settings})
    more = {"processing_class": tokenizer, **(more or {})}
    return PackedSFTTrainer(model, args, None, data, **more)
