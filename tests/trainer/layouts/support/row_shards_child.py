"""One of two ranks that share rows: losses and gradients of many models; prints one line of JSON.

Each rank also computes the whole row alone; the gradients of both ranks are averaged, as DDP does.
"""

from __future__ import annotations

import json
from typing import Any

import nopad.attention  # noqa: F401
import tiny_run
import torch
import torch.distributed as dist
from nopad.collators import PackedCollator
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring.packing_difference import measure_shard_difference
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GptOssConfig

SMALL: dict[str, Any] = {
    "vocab_size": tiny_run.VOCABULARY, "hidden_size": 24, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def build(config: Any, **how: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="nopad", **how).double()


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig

    return build(LlamaConfig(**{**SMALL, **settings}))


def checkpointed() -> Any:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


MODELS = {
    "grouped heads": llama,
    "one key head": lambda: llama(num_key_value_heads=1),
    "three key heads": lambda: llama(num_attention_heads=6, num_key_value_heads=3),
    "checkpointed": checkpointed,
    "softcap, window": lambda: build(Gemma2Config(**SMALL, sliding_window=5)),
    "sinks, window": lambda: build(
        GptOssConfig(**SMALL, sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
        experts_implementation="eager",
    ),
    "learned positions": lambda: build(
        GPT2Config(
            vocab_size=tiny_run.VOCABULARY,
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_positions=64,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
    ),
}


def odd_row(half: bool = False) -> dict:
    """A row of 31 tokens, so one is padding; half: only its first half has labels."""
    rows = [{"input_ids": list(range(1, 12))}, {"input_ids": list(range(12, 32))}]
    rows[1]["labels"] = [-100] * 20 if half else rows[1]["input_ids"]
    return PackedCollator()(rows)


BATCHES = {
    "row": lambda: tiny_run.batch_of(tiny_run.dataset(rank=0, world_size=1)),
    "odd": odd_row,
    "labels on one rank": lambda: odd_row(half=True),
    "by sample": lambda: tiny_run.batch_of(
        tiny_run.dataset(rank=0, world_size=1), mean="sample"
    ),
    "stacked": lambda: tiny_run.batch_of(tiny_run.dataset(rank=0, world_size=1), stack=True),
    "counted": lambda: {**odd_row(), "num_items_in_batch": 7.0},
}  # fmt: skip


def run(model: Any, batch: dict, group: Any) -> tuple[float, torch.Tensor, dict]:
    loss = attach_loss(model, sequence_group=group)
    model.zero_grad()
    total = model(**batch).loss
    total.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    losses: Any = loss.token_losses
    loss.detach()
    return total.item(), losses, gradients


def compare(model: Any, batch: dict) -> float:
    """How far a row on two ranks is from the whole one: its loss, token losses, gradients."""
    total, losses, gold = run(model, batch, None)
    ours, spread, gradients = run(model, batch, dist.group.WORLD)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    differences = [abs(ours - total) / total, float((losses - spread).abs().max())]
    for name, wanted in gold.items():
        apart = (gradients[name] / 2 - wanted).norm()
        differences.append(float(apart / wanted.norm().clamp(min=1e-9)))
    return float(torch.tensor(differences).max())  # NaN if one is


def told(work: Any) -> str:
    try:
        return f"nothing: {work()}"
    except ValueError as error:
        return str(error)


def refusals() -> dict[str, str]:
    group, batch = dist.group.WORLD, BATCHES["row"]()

    def without(model: Any, *names: str, **more: Any) -> Any:
        attach_loss(model, sequence_group=group)
        return model(**{k: v for k, v in batch.items() if k not in names}, **more)

    return {
        "stock attention": told(lambda: without(tiny_run.model("sdpa"))),
        "uneven heads": told(lambda: without(llama(num_attention_heads=3, num_key_value_heads=1))),
        "boundaries": told(lambda: without(llama(), "cu_seq_lens_q")),
        "masks": told(lambda: without(llama(), seq_idx=batch["position_ids"])),
    }


def logits() -> list:
    """Outside of training, metrics get the logits of the whole row."""
    model, batch = llama(), odd_row()
    with torch.no_grad():
        wanted = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        attach_loss(model, sequence_group=dist.group.WORLD).keep_logits()
        found = model(**batch).logits
    return [list(found.shape), float((found - wanted).abs().max())]


def start_check() -> list[float]:
    """A model that counts positions from the start of its part is noticed."""
    model, found = llama(initializer_range=0.2).float(), []
    attach_loss(model, sequence_group=dist.group.WORLD)
    found.append(measure_shard_difference(model, None, [9, 12, 7]))
    own = model.model.forward

    def forward(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        columns = torch.arange(position_ids.shape[-1])[None]
        return own(*args, position_ids=columns, **kwargs)

    model.model.forward = forward
    return [*found, measure_shard_difference(model, None, [9, 12, 7])]


def main() -> None:
    dist.init_process_group("gloo")
    distances = {name: compare(model(), BATCHES["row"]()) for name, model in MODELS.items()}
    distances |= {f"llama, {name}": compare(llama(), made()) for name, made in BATCHES.items()}
    distances["gemma2, odd"] = compare(MODELS["softcap, window"](), odd_row())
    found = {"distances": distances, "refusals": refusals(), "logits": logits()}
    print(json.dumps({**found, "start check": start_check()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
