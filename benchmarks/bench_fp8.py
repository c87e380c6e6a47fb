"""Training in fp8 beside bf16: speed, memory and losses on real text, with `PackedTrainer`.

    python benchmarks/bench_fp8.py --results FILE [--steps N] [--budget N] [--seeds N]
                                   [--seconds N]

The model is half of an 8B Llama (16 layers), from random weights in fp32 under bf16 autocast; the
text is Python's standard library, as bytes, in rows of `--budget` tokens. fp8 may differ from bf16
at the same seed by less than two seeds of bf16 differ. Each run is written into FILE when it ends,
and a run that FILE has is not repeated, so that a call may be as short as `--seconds` asks for.
Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from bench_convergence import END, MAX_LENGTH, documents
from nopad import PackedTrainer
from nopad.packing import PackedDataset
from record import header, write_record
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

WAYS = "bf16", "fp8"
WARMUP = 20
"""Steps before the clock starts; the learning rate rises as long."""


def model_config(tiny: bool) -> LlamaConfig:
    """Return the shape of Llama-3.1-8B with half of its layers."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2,
                 "vocab_size": END + 1}  # fmt: skip
    settings: dict = {"tie_word_embeddings": False, "max_position_embeddings": MAX_LENGTH}
    return LlamaConfig(**sizes, **settings, attn_implementation="nopad")


class Clock(TrainerCallback):
    """Collects losses, and measures the steps after the warm-up."""

    def __init__(self, warmup: int) -> None:
        self.losses: list[float] = []
        self.warmup, self.start, self.tokens = warmup, 0.0, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.warmup:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()


def train(way: str, seed: int, steps: int, budget: int, tiny: bool) -> dict[str, Any]:
    """Train, and return the loss of every step, tokens per second and peak memory."""
    on_gpu, warmup = torch.cuda.is_available(), min(WARMUP, steps // 2)
    torch.manual_seed(seed)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(model_config(tiny))
    rows = [{"input_ids": row} for row in documents()[: 2000 if tiny else None]]
    data = PackedDataset(rows, budget=budget, seed=seed, epochs=None, add_eos=False)
    clock = Clock(warmup)
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, bf16=on_gpu, use_cpu=not on_gpu, learning_rate=3e-4,
            lr_scheduler_type="cosine", warmup_steps=warmup, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_num_workers=1, seed=seed,
        )  # fmt: skip
        trainer = PackedTrainer(
            model, args, train_dataset=data, fp8=way == "fp8", callbacks=[clock]
        )
        trainer.train()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - clock.start
    lengths = [
        len(pack.tokens)
        for _, pack in zip(range(steps), PackedDataset(
            rows, budget=budget, seed=seed, epochs=None, add_eos=False
        ), strict=False)
    ]  # fmt: skip
    assert trainer.prepared_layers is not None
    return {
        "layers": trainer.prepared_layers.describe(),
        "budget": budget,
        "losses": clock.losses,
        "tokens_per_second": sum(lengths[warmup:]) / seconds,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }


def summarize(runs: dict[str, dict]) -> dict[str, float]:
    """Return speed, and distances of losses: fp8 from bf16, and bf16 from another seed."""
    curves = {name: np.array(run["losses"]) for name, run in runs.items()}
    bf16, other, fp8 = (
        curves.get(name) for name in ("bf16, seed 0", "bf16, seed 1", "fp8, seed 0")
    )
    if bf16 is None or other is None or fp8 is None:
        return {}
    last = slice(-max(1, len(bf16) // 4), None)
    by_way = [
        statistics.mean(
            run["tokens_per_second"] for name, run in runs.items() if name.startswith(way)
        )
        for way in WAYS
    ]
    return {
        "speed of fp8 over bf16": by_way[1] / by_way[0],
        "first loss": float(bf16[0]),
        "mean of the last quarter, bf16": float(bf16[last].mean()),
        "mean of the last quarter, fp8": float(fp8[last].mean()),
        "mean of the last quarter, fp8 - bf16": float(fp8[last].mean() - bf16[last].mean()),
        "mean of the last quarter, two seeds of bf16": float(
            abs(other[last].mean() - bf16[last].mean())
        ),
        "mean distance, fp8 and bf16": float(np.abs(fp8 - bf16).mean()),
        "mean distance, two seeds of bf16": float(np.abs(other - bf16).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="runs that are done, and where they are added")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a row")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="start no run later")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--tiny", action="store_true", help="small model, bf16 alone, any machine")
    args = parser.parse_args()
    kept, deadline = args.results, time.monotonic() + args.seconds
    runs = json.loads(kept.read_text()) if kept and kept.exists() else {}
    ways, budget = (WAYS[:1], 512) if args.tiny else (WAYS, args.budget)
    for way, seed in [(way, seed) for seed in range(args.seeds) for way in ways]:
        name = f"{way}, seed {seed}"
        if runs.get(name, {}).get("budget") != budget:
            runs.pop(name, None)
        if name not in runs and time.monotonic() < deadline:
            runs[name] = train(way, seed, args.steps, budget, args.tiny)
            write_record(runs, kept)
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        if run := runs.get(name):
            print(f"{name}: {run['tokens_per_second'] / 1e3:.1f} k tok/s, {run['peak_GB']:.1f} GB, "
                  f"losses {run['losses'][0]:.3f} ... {run['losses'][-1]:.3f}; {run['layers']}",
                  flush=True)  # fmt: skip
    summary = summarize(runs)
    for name, value in summary.items():
        print(f"{name}: {value:.4f}")
    record = {
        **header("fp8"),
        "steps": args.steps,
        "budget": budget,
        "summary": summary,
        "runs": runs,
    }
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
