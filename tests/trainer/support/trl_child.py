"""TRL's trainers and ours, as one of several ranks; prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pretended_gpus
import torch
import trl
from char_words import char_tokenizer
from datasets import Dataset
from nopad.inference import Engine
from nopad.runtime import destroy_group
from nopad.trainer.with_trl import (
    LiveGRPOTrainer,
    LiveRLOOTrainer,
    PackedDPOTrainer,
    PackedRewardTrainer,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 0,
         "bos_token_id": None, "max_position_embeddings": 64}  # fmt: skip
CONFIGS = {
    PackedDPOTrainer: trl.DPOConfig, PackedRewardTrainer: trl.RewardConfig,
    LiveGRPOTrainer: trl.GRPOConfig, LiveRLOOTrainer: trl.RLOOConfig,
}  # fmt: skip
STOCK = {
    PackedDPOTrainer: trl.DPOTrainer, PackedRewardTrainer: trl.RewardTrainer,
    LiveGRPOTrainer: trl.GRPOTrainer, LiveRLOOTrainer: trl.RLOOTrainer,
}  # fmt: skip
LIVE = (LiveGRPOTrainer, LiveRLOOTrainer)
KINDS = {"dpo": PackedDPOTrainer, "reward": PackedRewardTrainer,
         "grpo": LiveGRPOTrainer, "rloo": LiveRLOOTrainer}  # fmt: skip
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}  # fmt: skip
WORDS = ("abc", "defgh", "g", "hhha", "bcd", "fe", "ah", "ce")
PROMPTS = Dataset.from_list([{"prompt": text} for text in WORDS])
PAIRS = Dataset.from_list([
    {"prompt": text, "chosen": text[::-1] * 2, "rejected": text[:1] * (number + 1)}
    for number, text in enumerate(WORDS)
])  # fmt: skip


def letters(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("a")) for text in completions]


def causal_lm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with torch.no_grad():
        model.lm_head.weight.mul_(5)  # far from uniform, so that lengths and rewards differ
    return model


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1))


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def build(kind: Any, name: str, folder: Path, adapter: bool = False, **settings: Any) -> Any:
    """Return a trainer of a class; `name` says which of ours it is, or stands for."""
    ours = KINDS[name]
    usual = {"max_steps": 3, "per_device_train_batch_size": 4 if ours in LIVE else 2,
             "learning_rate": 0.1, "optim": "sgd", "gradient_checkpointing": False,
             "save_strategy": "no"}  # fmt: skip
    if ours in LIVE:
        usual |= {"num_generations": 4, "max_completion_length": 6}
    args = CONFIGS[ours](
        str(folder / "run"), use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        disable_tqdm=True, **{**usual, **settings},
    )  # fmt: skip
    more: dict[str, Any] = {"engine": Engine} if kind in LIVE else {}
    if ours in LIVE:
        more["reward_funcs"] = letters
    if adapter:
        more["peft_config"] = lora()
    torch.manual_seed(0)
    model = classifier() if name == "reward" else str(folder / "model")
    data = PROMPTS if ours in LIVE else PAIRS
    return kind(model, args=args, train_dataset=data, processing_class=char_tokenizer(), **more)


def trained(trainer: Any, replay: list | None = None) -> dict[str, Any]:
    """Train; return logs, weights and the completions of each call, or take those of `replay`."""
    made: list = []
    if replay is not None:
        replayed = iter(replay)
        is_grpo = isinstance(trainer, trl.GRPOTrainer)
        trainer._generate_single_turn = lambda *_, **__: (
            (next(replayed), None) if is_grpo else next(replayed)
        )
    elif isinstance(trainer, LIVE):
        complete = trainer._complete

        def recorded(*args, **kwargs):
            completions = complete(*args, **kwargs)
            made.append([list(c.token_ids) for c in completions])
            return completions

        trainer._complete = recorded
    trainer.train()
    clock = ("runtime", "per_second", "flos", "time")
    logs = [
        {name: value for name, value in line.items() if not any(t in name for t in clock)}
        for line in trainer.state.log_history
    ]
    named = trainer.model.named_parameters()
    whole = {n: getattr(p, "full_tensor", p.detach)().detach().cpu().clone() for n, p in named}
    return {"logs": logs, "made": made, "weights": whole,
            "sharded": any(hasattr(p, "full_tensor") for _, p in trainer.model.named_parameters()),
            "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()})}  # fmt: skip


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((weight - others[name]).abs().max().item() for name, weight in weights.items())


def main(folder: Path, layout: str, cases: list) -> None:
    if layout == "fsdp2":
        pretended_gpus.pretend_gpus()
        os.environ.update(FSDP)
    found = []
    for number, (name, how, settings) in enumerate(cases):
        result = trained(build(KINDS[name], name, folder, **settings))
        weights = result.pop("weights")
        if os.environ["RANK"] == "0":
            torch.save(weights, folder / f"{layout}-{number}.pt")
        if how == "beside":  # TRL's trainer on the same ranks
            stock = trained(build(STOCK[KINDS[name]], name, folder, **settings), result["made"])
            result["logs_of_trl"] = stock["logs"]
            result["distance"] = max(
                (weights[n] - stock["weights"][n]).abs().max() for n in weights
            ).item()
        found.append(result)
    print(json.dumps(found))
    destroy_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
