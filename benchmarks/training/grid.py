"""Families and modes of training beside the stock trainer, cell by cell; a cell is measured once.

A cell is a model with random weights in the shape of a known one, and a mode: full training with
fp32 weights under bf16 autocast, the same with gradient checkpointing, or LoRA on a bf16 base. Its
arms train on the same packs in the same process, in turn:

    stock        HF Trainer, flattening collator, liger-kernel, `attention` of the cell
    nopad        PackedTrainer with its defaults
    nopad fp8    the same with fp8=True

The losses of all arms are recorded: a peer whose loss is off is no peer.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import (
    DEEPSEEK_V3,
    GEMMA2_2B,
    GEMMA3_1B,
    GEMMA3_4B,
    GPT_OSS,
    GRANITE_2B,
    LLAMA_1B,
    LLAMA_8B,
    MISTRAL_7B,
    MIXTRAL,
    OLMO2_1B,
    OLMOE,
    QWEN2_1B,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_MOE,
    SMOLLM3_3B,
    config_of,
)
from transformers import AutoConfig, AutoModelForCausalLM

from .documents import random_documents
from .front_ends import Run, hf_nopad, hf_stock
from .users import add_adapters


@dataclass(frozen=True)
class Cell:
    """A model and how it is trained."""

    model_type: str
    sizes: dict[str, Any]
    mode: str = "full"
    attention: str = "flash_attention_2"
    """Of the stock trainer."""
    documents: Callable[..., list[np.ndarray]] = field(default=random_documents)


CELLS = {
    "llama-1b": Cell("llama", LLAMA_1B),
    "llama-1b checkpointed": Cell("llama", LLAMA_1B, "checkpointing"),
    "llama-1b lora": Cell("llama", LLAMA_1B, "lora"),
    "qwen2.5-1.5b": Cell("qwen2", QWEN2_1B),
    "qwen3-0.6b": Cell("qwen3", QWEN3_06B),
    "gemma2-2b": Cell("gemma2", GEMMA2_2B, attention="flex_attention"),
    "gemma3-1b": Cell("gemma3_text", GEMMA3_1B, attention="sdpa"),
    "olmo2-1b": Cell("olmo2", OLMO2_1B),
    "granite-2b": Cell("granite", GRANITE_2B),
    "smollm3-3b": Cell("smollm3", SMOLLM3_3B),
    "qwen3-4b lora": Cell("qwen3", QWEN3_4B, "lora"),
    "llama-8b, 16 layers": Cell("llama", {**LLAMA_8B, "num_hidden_layers": 16}),
    "llama-8b lora": Cell("llama", LLAMA_8B, "lora"),
    "mistral-7b lora": Cell("mistral", MISTRAL_7B, "lora"),
    "gemma3-4b lora": Cell("gemma3_text", GEMMA3_4B, "lora", attention="sdpa"),
    "olmoe": Cell("olmoe", OLMOE),
    "qwen3-30b-a3b": Cell("qwen3_moe", QWEN3_MOE),
    "mixtral": Cell("mixtral", MIXTRAL),
    "deepseek-v3": Cell("deepseek_v3", DEEPSEEK_V3),
    "gpt-oss": Cell("gpt_oss", GPT_OSS, attention="flex_attention"),
}

ARMS: dict[str, Callable[[Run, Any], None]] = {
    "stock": hf_stock,
    "nopad": hf_nopad,
    "nopad fp8": partial(hf_nopad, fp8=True),
}


def run_grid(record: Path, cells: list[str], arms: list[str], seconds: float, tiny: bool) -> None:
    """Measure the cells that a record does not have yet, until the time is up."""
    done: dict[str, dict] = json.loads(record.read_text()) if record.exists() else {}
    deadline = time.monotonic() + seconds
    for name in cells or CELLS:
        for arm in arms or ("stock", "nopad"):
            if arm in done.get(name, {}) or time.monotonic() > deadline:
                continue
            row = measure_arm(CELLS[name], arm, tiny)
            done.setdefault(name, {})[arm] = row
            record.write_text(json.dumps(done, indent=1) + "\n")
            print(f"{name:22} {arm:9} {_line(row)}", flush=True)


def _line(row: dict) -> str:
    if "error" in row:
        return row["error"]
    return (
        f"{row['tokens_per_second'] / 1e3:7.1f} k tok/s {row['peak_GB']:6.1f} GB, "
        f"{row['beyond_training_state_GB']:5.1f} beyond weights and optimizer; loss "
        f"{row['losses']}; first step {row['first_step_s']:.1f} s"
    )


def measure_arm(cell: Cell, arm: str, tiny: bool) -> dict[str, Any]:
    """Train one arm; return its figures, or the error that ended it."""
    budget, steps = (512, (2, 2)) if tiny else (16384, (5, 10))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    documents = cell.documents(budget, 30, 1000, 128 if tiny else 4096)
    checkpointed = cell.mode == "checkpointing"
    run = Run(documents, budget, *steps, bf16=not tiny, gradient_checkpointing=checkpointed)
    try:
        with _unpatched(cell):
            torch.manual_seed(0)
            model = _model(cell, "nopad" if arm != "stock" else cell.attention, device, tiny)
            size = _training_state(model)
            ARMS[arm](run := replace(run, losses=[], _created=time.perf_counter()), model)
            row = run.report()
            row["beyond_training_state_GB"] = row["peak_GB"] - size / 1e9
            row["attention"] = cell.attention if arm == "stock" else "nopad"
    except Exception as error:
        traceback.print_exc(limit=-3)
        row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    model = None
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return row


def _model(cell: Cell, attention: str, device: torch.device, tiny: bool) -> Any:
    config = config_of(cell.model_type, cell.sizes, tiny)
    config._attn_implementation = attention
    dtype = torch.bfloat16 if cell.mode == "lora" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return (add_adapters(model) if cell.mode == "lora" else model).train()


def _training_state(model: Any) -> int:
    """Bytes of the weights, and of fp32 gradients and two moments of those that are trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in model.parameters()) + 12 * trained


@contextmanager
def _unpatched(cell: Cell) -> Iterator[None]:
    """Undo what liger changes in the file of a model."""
    config = AutoConfig.for_model(cell.model_type)
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    module, forward = sys.modules[cls.__module__], cls.forward
    stock = dict(vars(module))
    forwards = {name: vars(x).get("forward") for name, x in stock.items() if isinstance(x, type)}
    try:
        yield
    finally:
        vars(module).update(stock)
        for name, original in forwards.items():
            if original is not None:
                vars(module)[name].forward = original
        cls.forward = forward
