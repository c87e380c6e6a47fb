"""Whether packed training learns what padded training learns, from the same batches.

    python benchmarks/bench_convergence.py [--against WAY ...] [--tokens N] [--seeds N] [--jobs N]

The data is Python's standard library as bytes, cut at its top-level functions and classes. Every
step has the documents of one pack. The ways to train on them, with fp32 weights under bf16 autocast
(on a GPU):

    packed     one row, attention `nopad`, fused kernels, the loss without logits
    flattened  one row, HF's flattening collator, stock attention and loss
    padded     a row per document, stock sdpa and loss; micro-batches of rows of similar length

All have the same token mean, so after any number of steps they should differ by less than two seeds
do. The validation loss is computed by a stock model in fp32, a padded row per document. Prints
the losses, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from nopad.attention import register
from nopad.collators import PackedCollator, PaddedCollator
from nopad.packing import IGNORE_INDEX, Pack, PackedDataset
from nopad.trainer.layers import prepare_layers
from nopad.trainer.loss import attach_loss
from record import header, write_record
from torch import Tensor
from training.front_ends import FlatteningCollator
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

MAX_LENGTH = 2048
"""Longer functions and classes are cut."""
PEERS = "padded", "flattened"
END = 256
"""The token after a document; the others are bytes."""
PADDED_ROWS = 14
"""Rows of a padded micro-batch."""
HELD_OUT = 50
"""Every fiftieth document is for validation."""


def documents() -> list[np.ndarray]:
    """Return the bytes of the standard library's top-level functions, classes and other parts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    parts = (part for file in files for part in re.split(rb"\n{3,}", file.read_bytes()))
    rows = (np.frombuffer(part, np.uint8).astype(np.int64) for part in parts if len(part) > 40)
    return [np.append(row[: MAX_LENGTH - 1], END) for row in rows]


class Convergence:
    """The model, the data, and the loop that all ways share."""

    def __init__(self, tiny: bool, tokens: int):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.budget = 2048 if tiny else 16384
        self.steps = max(1, tokens // self.budget)
        rows = documents()[: 2000 if tiny else None]
        self.held_out = rows[::HELD_OUT][:256]
        self.train_rows = [row for i, row in enumerate(rows) if i % HELD_OUT]
        width, layers = (64, 2) if tiny else (384, 6)
        self.config = LlamaConfig(
            vocab_size=END + 1,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64 if width >= 128 else 4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
        )

    def packs(self, seed: int) -> Iterator[Pack]:
        rows = [{"input_ids": row} for row in self.train_rows]
        return iter(PackedDataset(rows, budget=self.budget, seed=seed, epochs=None, add_eos=False))

    def train(self, way: str, seed: int) -> tuple[list[float], float]:
        """Return the training loss of every step, and the validation loss at the end."""
        register()
        torch.manual_seed(seed)
        # It takes a second to plan a new shape, and padded batches have one at each step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        flash = self.device.type == "cuda"
        stock = {"padded": "sdpa", "flattened": "flash_attention_2" if flash else "sdpa"}
        self.config._attn_implementation = stock.get(way, "nopad")
        model = LlamaForCausalLM(self.config).to(self.device).train()
        if way == "packed":
            attach_loss(model)
            prepare_layers(model, self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        schedule = get_cosine_schedule_with_warmup(optimizer, self.steps // 20, self.steps)
        losses: list[Tensor] = []
        for _, pack in zip(range(self.steps), self.packs(seed), strict=False):
            total = torch.zeros((), device=self.device)
            for batch in self.batches(way, pack):
                with torch.autocast("cuda", torch.bfloat16, enabled=flash):
                    loss = model(**batch).loss
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total)
        return torch.stack(losses).tolist(), self.validate(model)

    def batches(self, way: str, pack: Pack) -> list[dict]:
        """Return the micro-batches of one step."""
        if way == "padded":
            micro_batches = self.padded(pack)
        else:
            collator = PackedCollator() if way == "packed" else FlatteningCollator()
            micro_batches = [collator(pack)]
        return [
            {
                name: value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
                for name, value in batch.items()
            }
            for batch in micro_batches
        ]

    @staticmethod
    def padded(pack: Pack) -> list[dict]:
        """Return rows of similar lengths together; their losses add up to the token mean."""
        rows = [{"input_ids": ids} for ids in np.split(pack.tokens, pack.cu_seqlens[1:-1])]
        rows.sort(key=lambda row: len(row["input_ids"]))
        starts = range(0, len(rows), PADDED_ROWS)
        batches = [PaddedCollator()(rows[start : start + PADDED_ROWS]) for start in starts]
        trained = sum(int((batch["labels"][..., 1:] != IGNORE_INDEX).sum()) for batch in batches)
        return [{**batch, "num_items_in_batch": trained, "use_cache": False} for batch in batches]

    @torch.no_grad()
    def validate(self, model: LlamaForCausalLM) -> float:
        self.config._attn_implementation = "sdpa"
        stock = LlamaForCausalLM(self.config).to(self.device).eval()
        stock.load_state_dict(model.state_dict())
        total, count = 0.0, 0
        for start in range(0, len(self.held_out), 16):
            rows = [{"input_ids": row} for row in self.held_out[start : start + 16]]
            batch = {name: x.to(self.device) for name, x in PaddedCollator()(rows).items()}
            labels = batch["labels"]
            labels_counted = int((labels[..., 1:] != IGNORE_INDEX).sum())
            total += float(stock(**batch).loss) * labels_counted
            count += labels_counted
        return total / count


def summarize(results: dict[str, list[tuple[list[float], float]]]) -> dict:
    """Return validation losses, their spread over seeds, and distances between ways at one seed."""
    packed = [loss for _, loss in results["packed"]]
    summary: dict = {
        "validation": {way: [loss for _, loss in runs] for way, runs in results.items()},
        "spread over seeds": max(packed) - min(packed),
    }
    for way in results:
        pairs = zip(results["packed"], results[way], strict=True)
        gaps = [abs(ours[1] - theirs[1]) for ours, theirs in pairs]
        summary[f"|packed - {way}|"] = max(gaps)
    steps = slice(0, 200)
    curves = {way: [np.array(losses[steps]) for losses, _ in runs] for way, runs in results.items()}
    summary["first 200 steps, mean distance"] = {
        **{
            f"packed and {way}, same seed": statistics.mean(
                float(np.abs(a - b).mean())
                for a, b in zip(curves["packed"], curves[way], strict=True)
            )
            for way in curves
            if way != "packed"
        },
        "packed, two seeds": float(np.abs(curves["packed"][0] - curves["packed"][-1]).mean()),
    }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=30_000_000, help="per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--against", nargs="+", choices=PEERS, default=PEERS, help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--tiny", action="store_true", help="small model and data, for any machine")
    args = parser.parse_args()
    ways = ["packed", *args.against]
    bench = Convergence(args.tiny, args.tokens)
    results: dict[str, list[tuple[list[float], float]]] = {way: [] for way in ways}
    runs = [(way, seed) for way in ways for seed in range(args.seeds)]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        trainings = [pool.submit(bench.train, way, seed) for way, seed in runs]
        for (way, seed), training in zip(runs, trainings, strict=True):
            losses, validation = result = training.result()
            results[way].append(result)
            print(f"{way:10} seed {seed}  last loss {losses[-1]:.4f}  validation {validation:.4f}",
                  flush=True)  # fmt: skip
    record = {
        **header("convergence"),
        "tokens": bench.steps * bench.budget,
        "steps": bench.steps,
        "summary": summarize(results),
    }
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
