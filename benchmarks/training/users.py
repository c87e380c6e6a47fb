"""Trainings as users start them, each beside the stock one with liger-kernel on the same packs.

hf, accelerate, lightning    README's lines, fp32 weights under bf16 autocast
accumulation-4, -16          HF Trainer, micro-batches per step
checkpointing                HF Trainer with gradient checkpointing
fsdp2                        `fully_shard` with bf16 parameters, a loop of one's own
lora-1b, lora-8b             PEFT, r = 16 on all linear layers of a bf16 model
long                         rows of 131072 tokens, half of each one document, checkpointed
long-offloaded               the same after `offload_checkpoints(model)`
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .documents import long_documents
from .front_ends import (
    FlatteningCollator,
    Run,
    accelerate_nopad,
    accelerate_stock,
    adamw,
    apply_liger,
    hf_nopad,
    hf_stock,
    lightning_nopad,
    lightning_stock,
)

SHAPE_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "head_dim": 128, "tie_word_embeddings": False}  # fmt: skip


@dataclass
class Variant:
    """A training of ours and the stock one, with the settings of both."""

    ours: Callable[..., None]
    stock: Callable[..., None]
    run: Run
    prepare: Callable[[Any], Any] = lambda model: model
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


def user_variants(
    documents: list[np.ndarray], budget: int, steps: tuple[int, int], bf16: bool
) -> dict[str, Variant]:
    """Return the variants by name. steps: to warm up, and timed."""
    warmup, timed = steps
    run = Run(documents, budget, warmup, timed, bf16=bf16)
    few = replace(run, warmup_steps=2, timed_steps=max(2, timed // 3))
    lora = {"prepare": add_adapters, "dtype": torch.bfloat16}
    long_run = replace(
        run,
        documents=long_documents(8 * budget),
        budget=8 * budget,
        warmup_steps=1,
        timed_steps=2,
        gradient_checkpointing=True,
    )
    long = {"config": {"max_position_embeddings": 8 * budget}}
    offloaded = partial(hf_nopad, before=offload_model)
    return {
        "hf": Variant(hf_nopad, hf_stock, run),
        "accelerate": Variant(accelerate_nopad, accelerate_stock, run),
        "lightning": Variant(lightning_nopad, lightning_stock, run),
        "accumulation-4": Variant(hf_nopad, hf_stock, replace(few, accumulation=4)),
        "accumulation-16": Variant(
            hf_nopad, hf_stock, replace(few, accumulation=16, warmup_steps=1, timed_steps=2)
        ),
        "checkpointing": Variant(hf_nopad, hf_stock, replace(run, gradient_checkpointing=True)),
        "fsdp2": Variant(fsdp_nopad, fsdp_stock, run),
        "lora-1b": Variant(hf_nopad, hf_stock, run, **lora),
        "lora-8b": Variant(hf_nopad, hf_stock, few, **lora, config=SHAPE_8B),
        "long": Variant(hf_nopad, hf_stock, long_run, **long),
        "long-offloaded": Variant(offloaded, hf_stock, long_run, **long),
    }


def measure(variant: Variant, config: LlamaConfig, device: torch.device, repeats: int) -> dict:
    """Run both in turn, `repeats` times; return medians, all figures, and our ratio to the peer.

    Without a GPU only ours: liger's kernels need one.
    """
    sides = {"nopad": variant.ours, "stock": variant.stock}
    if device.type != "cuda":
        del sides["stock"]
    rows: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, train in sides.items():
            attention = "nopad" if side == "nopad" else "flash_attention_2"
            try:
                rows[side].append(_train_once(variant, train, config, attention, device))
            except Exception as error:  # the other variants still run
                print(f"  {side} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=-4)
    result = {side: _summary(runs) for side, runs in rows.items() if runs}
    if len(result) == 2:
        ours, stock = result["nopad"], result["stock"]
        names = ("tokens_per_second", "peak_GB", "beyond_training_state_GB")
        result["ratio"] = {n: ours[n] / stock[n] if stock[n] else 0.0 for n in names}
    return result


def _train_once(
    variant: Variant, train: Any, config: LlamaConfig, attention: str, device: torch.device
) -> dict:
    run = replace(variant.run, losses=[])
    with _stock_modules():
        torch.manual_seed(0)
        shape = LlamaConfig(**{**config.to_dict(), **variant.config})
        shape._attn_implementation = attention
        with device:
            model = LlamaForCausalLM(shape)
        model = variant.prepare(model.to(variant.dtype)).train()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        run._created = time.perf_counter()
        train(run, model)
        row = run.report()
    # fp32 gradients and two moments of what is trained, besides all weights
    row["beyond_training_state_GB"] = row["peak_GB"] - (weights + 12 * trained) / 1e9
    del model
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _summary(runs: list[dict]) -> dict:
    rates = sorted(row["tokens_per_second"] for row in runs)
    middle = min(runs, key=lambda row: abs(row["tokens_per_second"] - statistics.median(rates)))
    return {**middle, "all_tokens_per_second": rates}


@contextmanager
def _stock_modules() -> Iterator[None]:
    """Undo liger's changes of the model's file."""
    from transformers.models.llama import modeling_llama

    stock = dict(vars(modeling_llama))
    forward = LlamaForCausalLM.forward
    try:
        yield
    finally:
        vars(modeling_llama).update(stock)
        LlamaForCausalLM.forward = forward


def offload_model(model: Any) -> None:
    from nopad import offload_checkpoints

    offload_checkpoints(model)


def add_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


def fsdp_nopad(run: Run, model: Any) -> None:
    from nopad import attach_loss, compile_layers
    from nopad.trainer.data import PackedLoader

    attach_loss(model)
    compile_layers(model)
    batches = PackedLoader(run.dataset(), num_workers=1, pin_memory=True)
    _fsdp_loop(run, model, batches)


def fsdp_stock(run: Run, model: Any) -> None:
    apply_liger(model)
    collator = FlatteningCollator()
    _fsdp_loop(run, model, (collator(pack) for pack in run.packs()))


def _fsdp_loop(run: Run, model: Any, batches: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=policy)
        optimizer, loss = adamw(model), torch.zeros(())
        for _, batch in zip(range(run.steps), batches, strict=False):
            batch = {
                name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
                for name, value in batch.items()
            }
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.step_ended()
        run.losses.append(loss.item())
    finally:
        dist.destroy_process_group()
