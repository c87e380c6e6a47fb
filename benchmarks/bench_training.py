"""How fast packed training is, beside padded batches, HF's flattening collator and liger-kernel.

    python benchmarks/bench_training.py [--record FILE] [--only NAME ...] [--profile] [--tiny]

A Llama-3.2-1B shape in bf16 with random weights, rows of 16384 tokens in natural lengths, AdamW
(torch's fused one; ours with ours), gradient clipping; every variant trains on the same packs in
the same process. Variants named sft count the loss of the last 40 % of each document, the answer,
and no label before it. Useful tokens only: padding counts for nothing. MFU counts matrices, the
head's where there is a label, and, per sample, attention, against the matrix rate measured first.
Data wait is the share of time a step waits for its batch. Prints a table, and one JSON line last.
`--profile` lists the kernels of three steps of the first variant; `--tiny` runs the same code with
a small shape on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import nopad.attention  # noqa: F401
import numpy as np
import torch
from nopad.collators import PackedCollator, PaddedCollator
from nopad.packing import IGNORE_INDEX, PackedDataset
from nopad.trainer.data import PackedLoader
from nopad.trainer.fused import ClippedAdamW, compile_layers, fuse_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import ModelFlops
from record import head, write
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

LONGEST = 4096
ANSWER = 0.4
"""The share of a document that counts in the variants named sft."""
PADDED_BATCH, PADDED_STEPS = 8, 6
WARM, TIMED = 6, 12


def shape(tiny: bool, attention: str) -> LlamaConfig:
    """Llama 3.2 1B, or something a CPU can run."""
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


def documents(budget: int, packs: int, vocabulary: int, longest: int) -> list[np.ndarray]:
    """Random tokens in lengths as corpora have them: log-normal, median 400, 16 to `longest`."""
    draw = np.random.default_rng(0)
    lengths, total = [], 0
    while total < budget * packs:
        lengths.append(int(np.clip(draw.lognormal(np.log(400), 1.0), 16, longest)))
        total += lengths[-1]
    return [draw.integers(0, vocabulary, n) for n in lengths]


def answer(ids: np.ndarray) -> np.ndarray:
    """Labels of a document's last part only."""
    asked = len(ids) - round(ANSWER * len(ids))
    return np.where(np.arange(len(ids)) < asked, IGNORE_INDEX, ids)


class Watch:
    """Power and clock of the GPU while something runs: what limits a step may be the power cap.

    A context: whatever happens inside, no nvidia-smi is left running.
    """

    _process: subprocess.Popen | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        query = "--query-gpu=power.draw.instant,clocks.sm,clocks.max.sm,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"]
        if shutil.which(command[0]) is not None:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def stop(self) -> dict[str, float]:
        """The means since the start; nothing where nothing was started."""
        process, self._process = self._process, None
        if process is None:
            return {}
        process.terminate()
        lines = process.communicate()[0].decode().splitlines()
        rows = [[float(x) for x in line.split(",")] for line in lines[:-1] if "N/A" not in line]
        names = ("watts", "MHz", "MHz_at_most", "watts_at_most")
        columns = zip(*rows, strict=True)
        return {name: statistics.mean(c) for name, c in zip(names, columns, strict=False)}


class Bench:
    """The machine, the data, and one way to time a training loop for all variants."""

    def __init__(self, tiny: bool, profile: bool = False):
        self.tiny, self.profile = tiny, profile
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if tiny else torch.bfloat16  # few CPUs have fast bf16
        self.budget = 256 if tiny else 16384
        self.longest = 128 if tiny else LONGEST
        self.vocabulary = shape(tiny, "eager").vocab_size
        self.documents = documents(self.budget, 200, self.vocabulary, self.longest)
        self.peak = self._matmul_rate()
        self.results: dict[str, dict] = {}

    def _matmul_rate(self) -> float:
        size = 256 if self.tiny else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        times = []
        for _ in range(12):
            self.sync()
            began = time.perf_counter()
            a @ b
            self.sync()
            times.append(time.perf_counter() - began)
        return 2 * size**3 / statistics.median(times)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def model(self, attention: str) -> LlamaForCausalLM:
        torch.manual_seed(0)
        with self.device:
            model = LlamaForCausalLM(shape(self.tiny, attention))
        return model.to(self.dtype).train()

    def packs(self, collator, sft: bool = False) -> Iterator[tuple[dict, np.ndarray]]:
        """Batches of the one packed stream, collated by anyone, through a worker."""
        data = PackedDataset(
            [
                {"input_ids": ids, **({"labels": answer(ids)} if sft else {})}
                for ids in self.documents
            ],
            budget=self.budget,
            epochs=None,
            add_eos=False,
        )
        loader = PackedLoader(data, collator, num_workers=1, pin_memory=not self.tiny)
        self.waited = lambda: loader.waited
        for batch in loader:
            yield batch, loader.last.lengths

    def run(self, name: str, model: torch.nn.Module, batches, warm=WARM, timed=TIMED) -> dict:
        """Train; report useful tokens per second, MFU, memory, waits and the spread of steps."""
        flops, head = ModelFlops.of_model(model), 6 * model.get_output_embeddings().weight.numel()
        optimizer = self.optimizer(model)
        tokens, work, marks, losses, waited = [], [], [], [], 0.0
        with Watch() as watch:
            for number, (batch, lengths) in enumerate(batches):
                if number == warm:
                    if self.device.type == "cuda":
                        watch.start()
                    self._forget_peak()
                    waited = self.waited()
                marks.append(time.perf_counter())
                if number == warm + timed:
                    break
                losses.append(self.step(model, optimizer, batch))
                if number >= warm:
                    tokens.append(int(np.sum(lengths)))
                    idle = tokens[-1] - int((batch["labels"] != IGNORE_INDEX).sum())
                    work.append(flops.of(lengths) - head * idle)
            self.sync()
            seconds = time.perf_counter() - marks[warm]
            row = self._report(name, tokens, work, seconds, waited)
            row |= watch.stop()
        row["losses"] = [round(float(loss), 4) for loss in (losses[0], losses[-1])]
        if self.profile and self.device.type == "cuda":
            self.profile = False  # of the first variant only
            self._kernels(model, optimizer, batches)
        return row

    def _kernels(self, model, optimizer, batches) -> None:
        """Print where the device's time goes."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _, (batch, _) in zip(range(3), batches, strict=False):
                self.step(model, optimizer, batch)
            self.sync()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=25)[:9000], flush=True)

    def optimizer(self, model) -> torch.optim.Optimizer:
        if hasattr(model, "nopad_loss"):
            return ClippedAdamW(model.parameters(), lr=1e-5, max_norm=1.0)
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not self.tiny)

    def step(self, model, optimizer, batch: dict) -> torch.Tensor:
        batch = {
            k: v.to(self.device, non_blocking=True) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }
        loss = model(**batch).loss
        loss.backward()
        if not isinstance(optimizer, ClippedAdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _report(self, name, tokens, work, seconds, waited) -> dict:
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        row = {
            "tokens_per_second": sum(tokens) / seconds,
            "mfu": sum(work) / seconds / self.peak,
            "mfu_of_790": sum(work) / seconds / 790e12,
            "peak_GB": memory / 1e9,
            "data_wait": (self.waited() - waited) / seconds,
            "step_ms": 1e3 * seconds / len(tokens),
            "steps": len(tokens),
        }
        self.results[name] = row
        print(
            f"{name:34} {row['tokens_per_second'] / 1e3:8.1f} k tok/s {row['mfu']:7.1%} MFU "
            f"({row['mfu_of_790']:.1%} of 790) {row['peak_GB']:6.1f} GB wait {row['data_wait']:.2%}"
            f"  step {row['step_ms']:.0f} ms",
            flush=True,
        )
        return row


@contextmanager
def fresh(bench: Bench):
    """Leave nothing of one variant to the next, and go on when one fails."""
    began = time.perf_counter()
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
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)


def padded(bench: Bench) -> None:
    """Samples in random order, padded to their longest, stock sdpa.

    The same batches come twice and count the second time: planning for a new length takes a second
    or two, and a few steps hold more or fewer of those than a long run does.
    """
    collator, rng = PaddedCollator(), np.random.default_rng(1)
    batches = []
    for _ in range(PADDED_STEPS):
        chosen = rng.choice(len(bench.documents), 4 if bench.tiny else PADDED_BATCH)
        rows = [{"input_ids": bench.documents[i]} for i in chosen]
        lengths = np.array([len(row["input_ids"]) for row in rows])
        batches.append(({**collator(rows), "use_cache": False}, lengths))
    bench.waited = lambda: 0.0
    twice = chain(batches, batches, batches[:1])
    bench.run("hf padded sdpa", bench.model("sdpa"), twice, warm=PADDED_STEPS, timed=PADDED_STEPS)


class Flattening:
    """HF's flattening collator, given the samples of our packs."""

    def __init__(self):
        self.collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def __call__(self, pack) -> dict:
        cuts = pack.cu_seqlens[1:-1]
        pairs = zip(np.split(pack.tokens, cuts), np.split(pack.labels, cuts), strict=True)
        rows = [{"input_ids": ids.tolist(), "labels": marks.tolist()} for ids, marks in pairs]
        return {**self.collator(rows), "use_cache": False}


def flattened(bench: Bench, sft: bool = False) -> None:
    model = bench.model("sdpa" if bench.tiny else "flash_attention_2")
    bench.run(named("hf flattening + fa2", sft), model, bench.packs(Flattening(), sft))


def with_liger(bench: Bench, sft: bool = False) -> None:
    """The same with liger's rotary, norm, gate and fused loss, taken off again afterwards."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    patched = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    before = {name: getattr(modeling_llama, name) for name in patched}
    model = bench.model("sdpa" if bench.tiny else "flash_attention_2")
    try:
        apply_liger_kernel_to_llama(model=model)
        packs = bench.packs(Flattening(), sft)
        bench.run(named("hf flattening + fa2 + liger", sft), model, packs)
    finally:
        for name, original in before.items():
            setattr(modeling_llama, name, original)


def ours(bench: Bench, name: str, compiled: str, sft: bool = False, **collator) -> None:
    model = bench.model("nopad")
    attach_loss(model)
    if compiled:
        compile_layers(model, fullgraph=compiled == "fullgraph")
    fused = None if compiled else fuse_layers(model)
    try:
        packs = bench.packs(PackedCollator(**collator), sft)
        bench.run(named(f"nopad {name}", sft), model, packs)
    finally:
        if fused:
            fused.undo()


def named(name: str, sft: bool) -> str:
    return f"sft: {name}" if sft else name


def variants(bench: Bench) -> dict[str, Callable[[], None]]:
    fixed = {"fixed_sequences": 64, "max_length": bench.longest}
    return {
        "compiled": lambda: ours(bench, "compiled, T fixed", "fullgraph", pad_to_budget=True),
        "eager": lambda: ours(bench, "eager", ""),
        "liger": lambda: with_liger(bench),
        "flattening": lambda: flattened(bench),
        "padded": lambda: padded(bench),
        "sft-compiled": lambda: ours(
            bench, "compiled, T fixed", "fullgraph", True, pad_to_budget=True
        ),
        "sft-eager": lambda: ours(bench, "eager", "", True),
        "sft-liger": lambda: with_liger(bench, True),
        "sft-flattening": lambda: flattened(bench, True),
        "fixed": lambda: ours(bench, "compiled, all shapes fixed", "fullgraph", **fixed),
        "broken": lambda: ours(bench, "compiled, with graph breaks", "breaks", pad_to_budget=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="write the JSON there too")
    parser.add_argument("--only", nargs="*", help="names of variants to run")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--tiny", action="store_true", help="a small shape, on any machine")
    args = parser.parse_args()
    bench = Bench(args.tiny, args.profile)
    print(f"matrix rate {bench.peak / 1e12:.0f} TFLOP/s, rows of {bench.budget}", flush=True)
    for name, variant in variants(bench).items():
        needless = name == "broken" and any("compiled" in done for done in bench.results)
        if name in args.only if args.only else not needless:
            with fresh(bench):
                variant()
            # After each: a variant that hangs takes no other's result along.
            write(report(bench), args.record)
    print(json.dumps(report(bench)))


def report(bench: Bench) -> dict:
    """Everything measured so far, and on what."""
    return {
        **head("training"),
        "matmul_TFLOP_s": bench.peak / 1e12,
        "budget": bench.budget,
        "documents": f"log-normal, median 400, 16 to 4096 tokens; sft: {ANSWER:.0%} of each counts",
        "steps": {"warm": WARM, "timed": TIMED},
        "results": bench.results,
    }


if __name__ == "__main__":
    main()
