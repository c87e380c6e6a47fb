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


def _heads(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}


def _size(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA_1B = {**_size(2048, 8192, 16, 128256), **_heads(32, 8, 64), **TIED}
LLAMA_8B = {**_size(4096, 14336, 32, 128256), **_heads(32, 8, 128), **UNTIED}
QWEN2_1B = {**_size(1536, 8960, 28, 151936), **_heads(12, 2, 128), **TIED}
QWEN3_06B = {**_size(1024, 3072, 28, 151936), **_heads(16, 8, 128), **TIED}
QWEN3_4B = {**_size(2560, 9728, 36, 151936), **_heads(32, 8, 128), **TIED}
GEMMA2_2B = {**_size(2304, 9216, 26, 256000), **_heads(8, 4, 256)}
GEMMA3_1B = {**_size(1152, 6912, 26, 262144), **_heads(4, 1, 256), "sliding_window": 512}
GEMMA3_4B = {**_size(2560, 10240, 34, 262208), **_heads(8, 4, 256), "sliding_window": 1024}
OLMO2_1B = {**_size(2048, 8192, 16, 100352), **_heads(16, 16, 128), **UNTIED}
GRANITE_2B = {
    **_size(2048, 8192, 40, 49159), **_heads(32, 8, 64), **TIED,
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
}  # fmt: skip
SMOLLM3_3B = {**_size(2048, 11008, 36, 128256), **_heads(16, 4, 128), **TIED}
MISTRAL_7B = {**_size(4096, 14336, 32, 32768), **_heads(32, 8, 128), "sliding_window": None}
OLMOE = {**_size(2048, 1024, 6, 50304), **_heads(16, 16, 128), "num_experts": 64,
         "num_experts_per_tok": 8}  # fmt: skip
QWEN3_MOE = {**_size(2048, 6144, 6, 151936), **_heads(32, 4, 128), "num_experts": 128,
             "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # fmt: skip
MIXTRAL = {**_size(4096, 14336, 2, 32000), **_heads(32, 8, 128), "num_local_experts": 8,
           "num_experts_per_tok": 2}  # fmt: skip
DEEPSEEK_V3 = {
    **_size(2048, 5504, 6, 102400), "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {**_size(2880, 2880, 6, 201088), **_heads(64, 8, 64), "num_local_experts": 32,
           "num_experts_per_tok": 4, "sliding_window": 128}  # fmt: skip

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
    config = AutoConfig.for_model(cell.model_type, **(_tiny(cell.sizes) if tiny else cell.sizes))
    config.max_position_embeddings = 16384
    config.pad_token_id = None
    config._attn_implementation = attention
    dtype = torch.bfloat16 if cell.mode == "lora" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return (add_adapters(model) if cell.mode == "lora" else model).train()


def _tiny(sizes: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
             "num_local_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16}  # fmt: skip
    return {name: small.get(name, value) for name, value in sizes.items()}


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
