"""Speed of packed training beside padded batches, HF's flattening collator and liger-kernel.

    python benchmarks/bench_training.py [--record FILE] [--only NAME ...] [--repeats N]
                                        [--profile] [--tiny]

The model has the shape of Llama-3.2-1B with random weights. Every variant trains on the same packs
of 16384 tokens with natural document lengths, in the same process, with gradient clipping and
torch's AdamW. First come the trainings as users start them (`training/users.py`), each in turn with
the stock one, `--repeats` times; then loops of our own with bf16 weights. Variants named sft
compute the loss on the last 40 % of each document, the answer.

Only useful tokens count, not padding. MFU counts the matrix products, the head's only where there
is a label, and attention within each sample, relative to the matrix rate measured first. "data
wait" is the fraction of time that steps wait for their batch. Prints a table, and one JSON line
last. `--profile` lists the kernels of three steps of the first variant; `--tiny` runs the same code
with a small shape on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from nopad.attention import register
from nopad.collators import PackedCollator, PaddedCollator
from nopad.packing import IGNORE_INDEX, PackedDataset
from nopad.trainer.data import PackedLoader
from nopad.trainer.layers import compile_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import ModelFlops
from power_monitor import PowerMonitor
from record import header, write_record
from training.documents import ANSWER_FRACTION, answer_labels, random_documents
from training.front_ends import FlatteningCollator
from training.grid import run_grid
from training.users import measure, user_variants
from transformers import LlamaConfig, LlamaForCausalLM

MAX_LENGTH = 4096
PADDED_BATCH_SIZE, PADDED_STEPS = 8, 6
WARMUP_STEPS, TIMED_STEPS = 6, 12


def model_config(tiny: bool, attention: str) -> LlamaConfig:
    """Return the shape of Llama-3.2-1B, or one that a CPU can train."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    return LlamaConfig(
        **sizes,
        **heads,
        max_position_embeddings=16384,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )


class Bench:
    """The device, the documents, and the timed training loop of every variant."""

    def __init__(self, tiny: bool, profile: bool = False):
        self.tiny, self.profile = tiny, profile
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if tiny else torch.bfloat16  # bf16 is slow on most CPUs
        self.budget = 256 if tiny else 16384
        self.max_length = 128 if tiny else MAX_LENGTH
        vocab_size = model_config(tiny, "eager").vocab_size
        self.documents = random_documents(self.budget, 200, vocab_size, self.max_length)
        self.wait_seconds = lambda: 0.0
        self.matmul_rate = self._measure_matmul_rate()
        self.results: dict[str, dict] = {}
        self.user_results: dict[str, dict] = {}

    def _measure_matmul_rate(self) -> float:
        size = 256 if self.tiny else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        times = []
        for _ in range(12):
            self.sync()
            start = time.perf_counter()
            a @ b
            self.sync()
            times.append(time.perf_counter() - start)
        return 2 * size**3 / statistics.median(times)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def model(self, attention: str) -> LlamaForCausalLM:
        torch.manual_seed(0)
        with self.device:
            model = LlamaForCausalLM(model_config(self.tiny, attention))
        return model.to(self.dtype).train()

    def batches(self, collator, sft: bool = False) -> Iterator[tuple[dict, np.ndarray]]:
        """Yield batches of the same packs for every collator, loaded by a worker process."""
        data = PackedDataset(
            [
                {"input_ids": ids, **({"labels": answer_labels(ids)} if sft else {})}
                for ids in self.documents
            ],
            budget=self.budget,
            epochs=None,
            add_eos=False,
        )
        loader = PackedLoader(data, collator, num_workers=1, pin_memory=not self.tiny)
        self.wait_seconds = lambda: loader.wait_seconds
        for batch in loader:
            yield batch, loader.last_pack.lengths

    def run(
        self,
        name: str,
        model: torch.nn.Module,
        batches,
        warmup_steps: int = WARMUP_STEPS,
        timed_steps: int = TIMED_STEPS,
    ) -> dict:
        """Train; report useful tokens per second, MFU, memory, data wait, power and losses."""
        flops = ModelFlops.from_model(model)
        head_flops = 6 * model.get_output_embeddings().weight.numel()
        optimizer = self.optimizer(model)
        tokens, work, losses, start, wait_before = [], [], [], 0.0, 0.0
        with PowerMonitor() as power:
            for index, (batch, lengths) in enumerate(batches):
                if index == warmup_steps:
                    if self.device.type == "cuda":
                        power.start()
                    self._reset_peak_memory()
                    wait_before = self.wait_seconds()
                    start = time.perf_counter()
                if index == warmup_steps + timed_steps:
                    break
                losses.append(self.step(model, optimizer, batch))
                if index >= warmup_steps:
                    tokens.append(int(np.sum(lengths)))
                    unlabeled = tokens[-1] - int((batch["labels"] != IGNORE_INDEX).sum())
                    work.append(flops.step_flops(lengths) - head_flops * unlabeled)
            self.sync()
            seconds = time.perf_counter() - start
            row = self._report(name, tokens, work, seconds, wait_before)
            row |= power.stop()
        row["losses"] = [round(float(loss), 4) for loss in (losses[0], losses[-1])]
        if self.profile and self.device.type == "cuda":
            self.profile = False  # only the first variant is profiled
            self._print_kernels(model, optimizer, batches)
        return row

    def _print_kernels(self, model, optimizer, batches) -> None:
        """Print the kernels that take the most time on the device."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _, (batch, _) in zip(range(3), batches, strict=False):
                self.step(model, optimizer, batch)
            self.sync()
        table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=25)
        print(table[:9000], flush=True)

    def optimizer(self, model) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not self.tiny)

    def step(self, model, optimizer, batch: dict) -> torch.Tensor:
        batch = {
            k: v.to(self.device, non_blocking=True) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _report(self, name, tokens, work, seconds, wait_before) -> dict:
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        row = {
            "tokens_per_second": sum(tokens) / seconds,
            "mfu": sum(work) / seconds / self.matmul_rate,
            "mfu_of_790": sum(work) / seconds / 790e12,
            "peak_GB": memory / 1e9,
            "data_wait": (self.wait_seconds() - wait_before) / seconds,
            "step_ms": 1e3 * seconds / len(tokens),
            "steps": len(tokens),
        }
        self.results[name] = row
        print(
            f"{name:34} {row['tokens_per_second'] / 1e3:8.1f} k tok/s {row['mfu']:7.1%} MFU "
            f"({row['mfu_of_790']:.1%} of 790 TFLOP/s) {row['peak_GB']:6.1f} GB peak  "
            f"data wait {row['data_wait']:.2%}  step {row['step_ms']:.0f} ms",
            flush=True,
        )
        return row


@contextmanager
def isolated_variant(bench: Bench):
    """Free everything that a variant allocated or compiled; report a failure and continue."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        print(f"  failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-4)
    finally:
        torch._dynamo.reset()
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


def run_padded(bench: Bench) -> None:
    """Train on padded batches of random samples with stock sdpa.

    The same batches come twice and are timed the second time: the first batch of each length takes
    a second or two for kernel selection, which a long run would not notice.
    """
    collator, rng = PaddedCollator(), np.random.default_rng(1)
    batches = []
    for _ in range(PADDED_STEPS):
        indices = rng.choice(len(bench.documents), 4 if bench.tiny else PADDED_BATCH_SIZE)
        rows = [{"input_ids": bench.documents[i]} for i in indices]
        lengths = np.array([len(row["input_ids"]) for row in rows])
        batches.append(({**collator(rows), "use_cache": False}, lengths))
    bench.wait_seconds = lambda: 0.0
    twice = chain(batches, batches, batches[:1])
    bench.run("hf padded sdpa", bench.model("sdpa"), twice, PADDED_STEPS, PADDED_STEPS)


def run_flattening(bench: Bench, sft: bool = False) -> None:
    model = bench.model("sdpa" if bench.tiny else "flash_attention_2")
    batches = bench.batches(FlatteningCollator(), sft)
    bench.run(variant_name("hf flattening + fa2", sft), model, batches)


def run_liger(bench: Bench, sft: bool = False) -> None:
    """Add liger's rotary, norm, SwiGLU and fused loss, and remove its patches afterwards."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    patched = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    originals = {name: getattr(modeling_llama, name) for name in patched}
    model = bench.model("sdpa" if bench.tiny else "flash_attention_2")
    try:
        apply_liger_kernel_to_llama(model=model)
        batches = bench.batches(FlatteningCollator(), sft)
        bench.run(variant_name("hf flattening + fa2 + liger", sft), model, batches)
    finally:
        for name, original in originals.items():
            setattr(modeling_llama, name, original)


def run_nopad(bench: Bench, sft: bool = False, sequence_group=None) -> None:
    """Train compiled layers, or, with a group of ranks that share rows, stock ones."""
    register()
    model = bench.model("nopad")
    attach_loss(model, sequence_group=sequence_group)
    name = "nopad, one SP rank"
    if sequence_group is None:
        compile_layers(model)
        name = "nopad"
    bench.run(variant_name(name, sft), model, bench.batches(PackedCollator(), sft))


def run_one_rank(bench: Bench) -> None:
    """Train as a sequence-parallel group of one rank: what its code costs."""
    backend = "gloo" if bench.device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        run_nopad(bench, sequence_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def variant_name(name: str, sft: bool) -> str:
    return f"sft: {name}" if sft else name


def variants(bench: Bench) -> dict[str, Callable[[], None]]:
    return {
        "nopad": lambda: run_nopad(bench),
        "sequence-parallel": lambda: run_one_rank(bench),
        "liger": lambda: run_liger(bench),
        "flattening": lambda: run_flattening(bench),
        "padded": lambda: run_padded(bench),
        "sft-nopad": lambda: run_nopad(bench, True),
        "sft-liger": lambda: run_liger(bench, True),
        "sft-flattening": lambda: run_flattening(bench, True),
    }


def run_users(bench: Bench, only: list[str] | None, repeats: int, record: Path | None) -> None:
    """Measure the trainings as users start them, each beside the stock one."""
    register()
    steps = (2, 3) if bench.tiny else (WARMUP_STEPS, TIMED_STEPS)
    config = model_config(bench.tiny, "nopad")
    for name, variant in user_variants(
        bench.documents, bench.budget, steps, bf16=not bench.tiny
    ).items():
        if only and name not in only:
            continue
        result = bench.user_results[name] = measure(variant, config, bench.device, repeats)
        for side in ("nopad", "stock"):
            row = result.get(side)
            if row:
                print(
                    f"{name:16} {side:6} {row['tokens_per_second'] / 1e3:8.1f} k tok/s "
                    f"{row['peak_GB']:6.1f} GB  step {row['step_ms']:.0f} ms  {row['losses']}",
                    flush=True,
                )
        if "ratio" in result:
            print(f"{name:16} ratio {result['ratio']}", flush=True)
        write_record(build_record(bench), record)


def build_record(bench: Bench) -> dict:
    """Return all results so far."""
    lengths = (
        f"log-normal, median 400, 16 to 4096 tokens; sft: {ANSWER_FRACTION:.0%} of each counts"
    )
    return {
        **header("training"),
        "matmul_TFLOP_s": bench.matmul_rate / 1e12,
        "budget": bench.budget,
        "documents": lengths,
        "steps": {"warm": WARMUP_STEPS, "timed": TIMED_STEPS},
        "users": bench.user_results,
        "bf16 weights": bench.results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--only", nargs="*", help="variants to run: hf, lora-1b, nopad, ...")
    parser.add_argument("--repeats", type=int, default=3, help="of the trainings as users start")
    parser.add_argument("--profile", action="store_true", help="list the kernels of three steps")
    parser.add_argument("--tiny", action="store_true", help="small shape, for any machine")
    parser.add_argument("--grid", type=Path, help="measure cells of training/grid.py into FILE")
    parser.add_argument("--arms", nargs="*", help="of the grid: stock, nopad")
    parser.add_argument(
        "--seconds", type=float, default=480, help="start no cell of the grid later"
    )
    args = parser.parse_args()
    if args.grid:
        register()
        run_grid(args.grid, args.only or [], args.arms or [], args.seconds, args.tiny)
        return
    bench = Bench(args.tiny, args.profile)
    print(
        f"matrix rate {bench.matmul_rate / 1e12:.0f} TFLOP/s, packs of {bench.budget}", flush=True
    )
    run_users(bench, args.only, args.repeats, args.record)
    for name, variant in variants(bench).items():
        if not args.only or name in args.only:
            with isolated_variant(bench):
                variant()
            # After every variant: one that hangs must not lose the results of the others.
            write_record(build_record(bench), args.record)
    print(json.dumps(build_record(bench)))


if __name__ == "__main__":
    main()
