"""Train compiled layers for three steps on the GPU; print a digest of the weights."""

from __future__ import annotations

import tempfile

import tiny_run
import torch
from nopad.trainer.with_hf import PackedTrainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(
        **sizes, **heads, vocab_size=tiny_run.VOCABULARY, attn_implementation="nopad"
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=3, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        data = tiny_run.dataset(400, budget=1024)
        trainer = PackedTrainer(LlamaForCausalLM(config), args, train_dataset=data)
        trainer.train()
    assert trainer.prepared_layers is not None and trainer.prepared_layers.way == "compiled"
    print(tiny_run.digest(trainer.model))
