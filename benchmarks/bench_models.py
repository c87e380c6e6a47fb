"""Hybrids, an encoder and a vision-language model: packs beside padded batches.

    python benchmarks/bench_models.py [--record FILE] [--only NAME ...] [--tiny]

A model with random weights in the shape of a known one is trained in turns, in one process:

    padded     the stock HF Trainer on batches of 8 padded documents (4 with images; 4 for hybrids,
               which do not fit otherwise), in random order
    packed     PackedTrainer on packs of 16,384 tokens (8,192 with images) of the same documents
    unbroken   PackedTrainer on rows of one document each: what boundaries cost (text only)

Hybrids then generate in the engine, 64 requests at once; the floor of a step is the time to read
the weights and keys, and to read and write the states, at the copy bandwidth. Only useful tokens
count. The losses of the first two differ, since their batches do. `--tiny` runs the same code with
small shapes on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from bench_generation import ceilings
from nopad import Engine, PackedDataset, SamplingParams
from nopad.attention.hf import layer_shapes, stateful_parts
from nopad.collators import MaskedCollator
from PIL import Image
from record import header, write_record
from tokenizers import Tokenizer
from tokenizers import models as token_models
from torch import nn
from training.documents import random_documents
from training.front_ends import Clock, Run, hf_arguments, hf_nopad
from training.users import add_adapters
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer

Arms = dict[str, Callable[[], dict[str, Any]]]
"""What each arm of a cell measures; one that fails does not stop the others."""
PADDED_BATCH, SMALL_PADDED_BATCH = 8, 4
DELTA_NET = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "vocab_size": 151936,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
MAMBA_2 = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 64, "mamba_d_head": 64,
    "attn_layer_indices": [4, 11], "tie_word_embeddings": True,
}  # fmt: skip
ENCODER = {  # ModernBERT-base
    "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "vocab_size": 50368,
    "num_attention_heads": 12,
}  # fmt: skip
VISION_LANGUAGE = {  # Qwen2.5-VL-3B
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420,
                      "num_heads": 16, "out_hidden_size": 2048},
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "depth": 2, "num_heads": 4,
    "out_hidden_size": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16, "attn_layer_indices": [1], "mrope_section": [2, 3, 3],
}  # fmt: skip
MARKS = ["<eos>", "<user>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for m in messages %}<user>{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "<eos>{% endfor %}"
)


@dataclass
class Bench:
    """Sizes and device of all cells."""

    tiny: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def budget(self) -> int:
        return 512 if self.tiny else 16384

    @property
    def max_length(self) -> int:
        return 128 if self.tiny else 4096

    def config(self, name: str, sizes: dict[str, Any]) -> Any:
        """Return a configuration of Transformers, by the name of its class."""
        return getattr(transformers, name)(**(_shrunk(sizes) if self.tiny else sizes))

    def documents(self, vocab_size: int, unbroken: bool = False) -> list[np.ndarray]:
        if unbroken:
            rng = np.random.default_rng(0)
            return [rng.integers(5, vocab_size, self.budget) for _ in range(40)]
        return [ids + 5 for ids in
                random_documents(self.budget, 40, vocab_size - 5, self.max_length)]  # fmt: skip

    def run(self, documents: list[np.ndarray]) -> Run:
        steps = (2, 2) if self.tiny else (5, 10)
        return Run(documents, self.budget, *steps, bf16=not self.tiny)


def _shrunk(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _shrunk(value)
        if isinstance(value, dict) and name != "rope_parameters"
        else {**value, "mrope_section": SMALL["mrope_section"]}
        if name == "rope_parameters"
        else SMALL.get(name, value)
        for name, value in sizes.items()
    }


def hybrid(bench: Bench, config_class: str, sizes: dict[str, Any]) -> Arms:
    """Train a causal LM with recurrent layers, then generate with it."""
    config = bench.config(config_class, {**sizes, "max_position_embeddings": 16384,
                                         "pad_token_id": 0})  # fmt: skip
    documents = bench.documents(config.vocab_size)

    def model(attention: str) -> nn.Module:
        torch.manual_seed(0)
        config._attn_implementation = attention
        with bench.device:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    def padded() -> dict[str, Any]:
        stock = model("sdpa")
        return train_padded(
            bench.run(documents), stock, pad_documents, documents, SMALL_PADDED_BATCH
        )

    rows = bench.documents(config.vocab_size, unbroken=True)
    return {
        # Twice: recurrent kernels are tuned for every new length, and the batches are the same.
        "padded": lambda: [padded(), padded()][1],
        "packed": lambda: train_packed(bench.run(documents), model("nopad")),
        "unbroken": lambda: train_packed(bench.run(rows), model("nopad")),
        "decode": lambda: decode(bench, model("nopad").to(torch.bfloat16).eval()),
    }


def encoder(bench: Bench) -> Arms:
    """Train ModernBERT-base as a masked LM."""
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0,
           "sep_token_id": 0}  # fmt: skip
    config = bench.config("ModernBertConfig", {**ENCODER, **ids})
    documents = bench.documents(config.vocab_size)
    tokenizer = text_tokenizer(config.vocab_size)
    masked = transformers.DataCollatorForLanguageModeling(tokenizer)

    def model(attention: str) -> nn.Module:
        torch.manual_seed(0)
        config._attn_implementation = attention
        with bench.device:
            return transformers.ModernBertForMaskedLM(config).train()

    def pad(rows: list[np.ndarray]) -> dict[str, Any]:
        return masked([{"input_ids": row} for row in rows])

    stock = "sdpa" if bench.tiny else "flash_attention_2"
    collator = MaskedCollator(tokenizer, seed=0)
    return {
        "padded": lambda: train_padded(bench.run(documents), model(stock), pad, documents),
        "packed": lambda: train_packed(
            bench.run(documents), model("nopad"), data_collator=collator
        ),
    }


@dataclass
class ImageRun(Run):
    """A training on chats with images, which a processor turns into tokens and pixels."""

    processor: Any = None

    def dataset(self, epochs: int | None = None) -> PackedDataset:
        rows: Any = self.documents
        return PackedDataset(rows, tokenizer=self.processor, budget=self.budget, epochs=epochs)


def vision_language(bench: Bench) -> Arms:
    """Train LoRA on Qwen2.5-VL-3B, with images of natural sizes."""
    processor = image_processor(bench)
    ids = processor.tokenizer.convert_tokens_to_ids
    config = bench.config("Qwen2_5_VLConfig", VISION_LANGUAGE)
    config.image_token_id, config.vision_start_token_id = ids("<|image_pad|>"), ids(MARKS[2])
    config.vision_end_token_id = ids(MARKS[4])
    rows = image_chats(bench)

    def model(attention: str) -> nn.Module:
        torch.manual_seed(0)
        config._attn_implementation = attention
        dtype = torch.float32 if bench.tiny else torch.bfloat16
        with bench.device:
            stock = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
                config, dtype=dtype
            )
        return add_adapters(stock).train()

    def pad(rows: list[dict]) -> dict[str, Any]:
        texts = [processor.apply_chat_template(row["messages"], tokenize=False) for row in rows]
        images = [[part["image"] for turn in row["messages"] for part in turn["content"]
                   if part["type"] == "image"] for row in rows]  # fmt: skip
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return dict(batch)

    def run() -> ImageRun:
        steps = (2, 2) if bench.tiny else (4, 6)
        options: Any = {"bf16": not bench.tiny, "workers": 4, "processor": processor}
        return ImageRun(rows, bench.budget // 2, *steps, **options)

    stock = "sdpa" if bench.tiny else "flash_attention_2"
    return {
        "padded": lambda: train_padded(run(), model(stock), pad, rows, SMALL_PADDED_BATCH),
        "packed": lambda: train_packed(run(), model("nopad")),
    }


def text_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one letter each; special tokens and the start check's letters first."""
    first = [*MARKS, *"abcdefgh"]
    vocabulary = [*first, *(chr(0x20000 + number) for number in range(vocab_size - len(first)))]
    core = Tokenizer(token_models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    special = {"eos_token": MARKS[0], "pad_token": MARKS[0], "mask_token": MARKS[1]}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **special, additional_special_tokens=MARKS[1:],
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def image_processor(bench: Bench) -> Any:
    """Return the processor of Qwen2.5-VL over a tokenizer of letters, without one for videos."""
    base = transformers.Qwen2_5_VLProcessor
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    images = transformers.Qwen2VLImageProcessor(
        patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=28 * 28 * 4,
        max_pixels=28 * 28 * (16 if bench.tiny else 1280),
    )  # fmt: skip
    tokenizer = text_tokenizer(295 if bench.tiny else 20000)
    return type(base.__name__, (base,), unchecked)(images, tokenizer, chat_template=TEMPLATE)


def image_chats(bench: Bench) -> list[dict]:
    """Return chats of one or two images and some text, both with natural sizes."""
    rng, chats = np.random.default_rng(0), []
    median, shortest, letters = (60, 28, 200) if bench.tiny else (500, 100, 19000)
    for _ in range(60 if bench.tiny else 400):
        height, width = np.clip(rng.lognormal(np.log(median), 0.5, 2), shortest, 4 * median)
        pixels = rng.integers(0, 256, (int(height), int(width), 3), dtype=np.uint8)
        length = int(np.clip(rng.lognormal(np.log(median / 4), 1.0), 8, 2 * median))
        text = "".join(chr(0x20000 + number) for number in rng.integers(0, letters, length))
        parts = [{"type": "image", "image": Image.fromarray(pixels)}] * (1 + (rng.random() < 0.2))
        question = {
            "role": "user",
            "content": [*parts, {"type": "text", "text": text[: length // 2]}],
        }
        answer = {"role": "assistant", "content": [{"type": "text", "text": text[length // 2 :]}]}
        chats.append({"messages": [question, answer]})
    return chats


def pad_documents(rows: list[np.ndarray]) -> dict[str, Any]:
    width = max(len(row) for row in rows)
    ids = torch.tensor(np.array([np.pad(row, (0, width - len(row))) for row in rows]))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train_packed(run: Run, model: nn.Module, **options: Any) -> dict[str, Any]:
    """Train on packs."""
    hf_nopad(run, model, **options)
    return run.report()


def train_padded(
    run: Run,
    model: nn.Module,
    pad: Callable[[list], dict[str, Any]],
    rows: list,
    batch_size: int = PADDED_BATCH,
) -> dict[str, Any]:
    """Train on padded batches; count the tokens that are not padding."""
    masks = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: masks.append(inputs["attention_mask"]), with_kwargs=True
    )
    with TemporaryDirectory() as folder:
        args = hf_arguments(
            run, folder, per_device_train_batch_size=batch_size, remove_unused_columns=False
        )
        Trainer(model, args, pad, rows, callbacks=[Clock(run)]).train()
    timed = masks[run.warmup_steps : run.steps]
    useful = sum(int(mask.sum()) for mask in timed)
    return {
        "tokens_per_second": useful / run.seconds,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0,
        "step_ms": 1e3 * run.seconds / run.timed_steps,
        "fill": useful / sum(mask.numel() for mask in timed),
        "losses": [round(loss, 4) for loss in run.losses],
    }


def decode(bench: Bench, model: nn.Module) -> dict[str, Any]:
    """Time the decode steps of 64 requests, and what they have to read and write."""
    # Long prompts would take most of the time, and their time varies more than that of the steps.
    count, prompt, most, fewest = (8, 12, 16, 4) if bench.tiny else (64, 12, 200, 8)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, model.config.vocab_size, prompt).tolist() for _ in range(count)]
    engine = Engine(model, max_num_seqs=count)

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - start

    seconds(most)
    long, short = (min(seconds(tokens) for _ in range(4)) for tokens in (most, fewest))
    step = (long - short) / (most - fewest)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = sum(state.bytes for state in stateful_parts(model).values())
    keys = 2 * sum(heads * (key + value) for heads, key, value in layer_shapes(model))
    step_bytes = weights + count * (2 * states + keys * (prompt + (most + fewest) / 2))
    row = {"tokens_per_second": count / step, "step_ms": 1e3 * step, "step_MB": step_bytes / 1e6}
    if not torch.cuda.is_available():
        return row
    floor = step_bytes / ceilings()[0]
    return {**row, "floor_ms": 1e3 * floor, "of_floor": floor / step}


CELLS: dict[str, Callable[[Bench], Arms]] = {
    "qwen3.5-1b": partial(hybrid, config_class="Qwen3_5TextConfig", sizes=DELTA_NET),
    "bamba-1b": partial(hybrid, config_class="BambaConfig", sizes=MAMBA_2),
    "modernbert-base": encoder,
    "qwen2.5-vl-3b lora": vision_language,
}


def main() -> None:
    """Measure the cells, print each arm, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    args = parser.parse_args()
    bench, cells = Bench(args.tiny), {}
    record = {**header("models"), "budget": bench.budget, "cells": cells}
    for name in args.only:
        cells[name] = {}
        for arm, measure in CELLS[name](bench).items():
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                row = measure()
            except Exception as error:
                traceback.print_exc(limit=-3)
                row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            cells[name][arm] = row
            write_record(record, args.record)
            figures = ", ".join(f"{key} {value}" for key, value in row.items())
            print(f"{name:20} {arm:9} {figures}", flush=True)
    print(json.dumps(record, default=float))


if __name__ == "__main__":
    main()
