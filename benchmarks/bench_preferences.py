"""DPO and reward training on packs, beside TRL's trainers on padded batches.

    python benchmarks/bench_preferences.py [--record FILE] [--tasks dpo reward] [--tiny]

Rows are random tokens with natural lengths: prompts log-normal around 120 tokens, answers around
250. Each way trains the Llama-1B shape on the same batches, with TRL's default settings (bf16
autocast, gradient checkpointing, at most 1,024 tokens a sequence); DPO has a reference model. TRL
runs flash-attn 2, without and with liger-kernel. The losses of a task must agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from bench_rollouts import make_tokenizer
from datasets import Dataset
from nopad.trainer.with_trl import PackedDPOTrainer, PackedRewardTrainer
from record import header, write_record
from shapes import LLAMA_1B
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

WARMUP_STEPS, TIMED_STEPS = 4, 10
TASKS: dict[str, tuple[Any, Any, Any]] = {
    "dpo": (PackedDPOTrainer, DPOTrainer, DPOConfig),
    "reward": (PackedRewardTrainer, RewardTrainer, RewardConfig),
}
"""Our trainer, TRL's and their configuration."""
WAYS: dict[str, dict[str, Any]] = {"nopad": {}, "TRL": {}, "TRL liger": {"use_liger_kernel": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--tiny", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {**header("preferences"), "pairs": args.pairs, "results": {}}
    for task in args.tasks:
        results = record["results"][task] = {}
        for way in args.ways:
            try:
                results[way] = train(task, way, args.pairs, args.tiny)
            except (Exception, SystemExit) as error:
                results[way] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            gc.collect()
            torch.cuda.empty_cache()
            print(task, way, results[way], flush=True)
            write_record(record, args.record)
    print(json.dumps(record))


def train(task: str, way: str, pairs: int, tiny: bool) -> dict[str, Any]:
    ours, theirs, config = TASKS[task]
    on_gpu, clock = torch.cuda.is_available(), Clock()
    data, longest = rows(pairs * (WARMUP_STEPS + TIMED_STEPS), tiny)
    with TemporaryDirectory() as folder:
        settings = config(
            folder,
            max_steps=WARMUP_STEPS + TIMED_STEPS,
            per_device_train_batch_size=pairs,
            max_length=longest,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=TIMED_STEPS + WARMUP_STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **WAYS[way],
        )
        more = {"ref_model": make_model(task, way, tiny)} if task == "dpo" else {}
        kind: Callable[..., Any] = ours if way == "nopad" else theirs
        trainer = kind(
            make_model(task, way, tiny),
            args=settings,
            train_dataset=data,
            processing_class=make_tokenizer("tiny" if tiny else "1b"),
            callbacks=[clock],
            **more,
        )
        trainer.train()
    loss = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    return {
        "pairs_per_second": pairs * TIMED_STEPS / clock.seconds,
        "step_ms": 1e3 * clock.seconds / TIMED_STEPS,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        "loss": loss,
    }


class Clock(TrainerCallback):
    """The seconds of the timed steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (WARMUP_STEPS, WARMUP_STEPS + TIMED_STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                if state.global_step == WARMUP_STEPS:
                    torch.cuda.reset_peak_memory_stats()
            now = time.perf_counter()
            self.seconds = now - getattr(self, "started", now)
            self.started = now


def rows(pairs: int, tiny: bool) -> tuple[Dataset, int]:
    """Return pairs of answers, and the longest sequence."""
    rng = np.random.default_rng(0)
    vocab, scale = (127, 0.1) if tiny else (LLAMA_1B["vocab_size"] - 1, 1.0)

    def words(median: float, spread: float) -> str:
        length = int(np.clip(rng.lognormal(np.log(median * scale), spread), 4, 2048))
        return " ".join(f"w{n}" for n in rng.integers(1, vocab, length))

    answers = "chosen", "rejected"
    texts = [
        {"prompt": words(120, 1.0), **{name: " " + words(250, 0.8) for name in answers}}
        for _ in range(pairs)
    ]
    return Dataset.from_list(texts), 128 if tiny else 1024


def make_model(task: str, way: str, tiny: bool) -> Any:
    """Return a model with random weights; the attention of TRL's is flash-attn's on a GPU."""
    torch.manual_seed(0)
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    peer = "flash_attention_2" if torch.cuda.is_available() else "sdpa"
    config = LlamaConfig(
        **(small if tiny else LLAMA_1B),
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
        attn_implementation="nopad" if way == "nopad" else peer,
    )
    if task == "dpo":
        return LlamaForCausalLM(config)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


if __name__ == "__main__":
    main()
