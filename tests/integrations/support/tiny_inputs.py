"""Files that a framework reads: a tiny Llama with its tokenizer, Alpaca rows and examples."""

from __future__ import annotations

import json
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_inputs(folder) -> None:
    """Write a tiny Llama with its tokenizer, Alpaca rows, and examples to complete."""
    vocab = ["<|begin_of_text|>", "<|end_of_text|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    ends = {"bos_token": vocab[0], "eos_token": vocab[1]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **ends)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [{"instruction": f"Count to {n}" + "." * draw.randrange(30), "input": "",
             "output": "!" * draw.randrange(1, 60)} for n in range(40)]  # fmt: skip
    examples = [{"prompt": row["instruction"], "completion": row["output"]} for row in rows[:3]]
    for name, lines in (("alpaca", rows), ("examples", examples)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
