"""Decode steps and prefill with hand-fused and with compiled layers, per model shape.

    python benchmarks/bench_decode_layers.py --record FILE      # on a GPU: the shapes FILE lacks
    TRITON_INTERPRET=1 python benchmarks/bench_decode_layers.py --tiny      # on a CPU

    hand-fused   hand-fused layers, which the engine has for these shapes
    compiled     compiled layers, with stacked projections and gated products, as for all others

Step: the difference of two lengths of `Engine.generate` per step between them, each the least of
three calls, with the prompts in the prefix cache. Prefill: 32 prompts of 1,024 tokens with one new
token each, in captured steps of 2,048 tokens and in steps of 16,384, too large for a graph. First
call: eight tokens of one request, compilation included. Floor: generation/floor.py. Each shape has
a process of its own. Prints a table in milliseconds, and one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import nopad.inference.executor as executor
import nopad.inference.fused.fused_decoder as fused_decoder
import nopad.inference.fused.fused_ops as fused_ops
import numpy as np
import shapes
import torch
from bench_generation import ceilings, sampling_params
from bench_shapes import run_child
from generation.floor import floor_seconds
from generation.workloads import Workload, build_model
from nopad.inference import Engine
from record import header, timed, write_record

CHILD_SECONDS = 240
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("llama", shapes.LLAMA_8B),
    "qwen3-4b": ("qwen3", shapes.QWEN3_4B),
    "qwen2.5-1.5b": ("qwen2", shapes.QWEN2_1B),
    "qwen3-8b": ("qwen3", shapes.QWEN3_8B),
    "llama-1b": ("llama", shapes.LLAMA_1B),
    "qwen3-0.6b": ("qwen3", shapes.QWEN3_06B),
}
HAND_FUSED, COMPILED = LAYERS = "hand-fused", "compiled"
REPEATS = 3


class Bench:
    """A model of one shape, and the steps to measure."""

    def __init__(self, name: str, tiny: bool):
        self.on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if self.on_gpu else ("cpu", torch.float32)
        config = shapes.config_of(*SHAPES[name], tiny=tiny)
        self.model: Any = build_model(config, device, dtype)
        self.rows = (1, 3) if tiny else (1, 8, 32, 64, 128, 192, 256)
        self.prefill_sizes = (16,) if tiny else (2048, 16384)
        self.lengths = (6, 3) if tiny else (64, 16)
        # Prefixes are cached in strides of 16 tokens: the first step computes one token each.
        prompt, prefill = (17, (4, 20)) if tiny else (369, (32, 1024))
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(1, config.vocab_size, (max(self.rows), prompt)).tolist()
        self.prefill = rng.integers(1, config.vocab_size, prefill).tolist()

    def milliseconds(self, seconds: Callable[[Workload, int], float]) -> dict[str, float]:
        """Return the time of each step.

        seconds: time of a workload and the tokens of its prefill steps; 0: its prompts are cached.
        """
        found, (long, short) = {}, self.lengths
        for count in self.rows:
            work = partial(Workload, self.prompts[:count])
            between = seconds(work([long] * count), 0) - seconds(work([short] * count), 0)
            found[f"step of {count}"] = 1e3 * between / (long - short)
        work, num_tokens = Workload(self.prefill, [1] * len(self.prefill)), np.size(self.prefill)
        for size in self.prefill_sizes:
            found[f"prefill of {size}"] = 1e3 * seconds(work, size) * size / num_tokens
        return found

    def measure(self, layers: str) -> dict[str, float]:
        """Return the times of the engine with these layers."""
        memory = 40 << 30 if self.on_gpu else 1 << 26
        engine = Engine(self.model, memory=memory, max_num_seqs=max(self.rows))

        def seconds(work: Workload, prefill_size: int = 0, calls: int = 1 + REPEATS) -> float:
            times = []
            for _ in range(calls):
                if prefill_size:
                    engine.max_num_batched_tokens = prefill_size
                    engine.reset_prefix_cache()
                call = partial(engine.generate, work.prompts, sampling_params(work))
                times.append(timed(call)[0])
            return min(times[1:] or times)

        try:
            first_call = seconds(Workload(self.prompts[:1], [8]), calls=1)
            ops = {op.__name__ for op in engine._executor.fused_ops._ops}
            assert {HAND_FUSED: "captured steps", COMPILED: "compiled layers"}[layers] in ops, ops
            seconds(Workload(self.prompts, [1] * len(self.prompts)), calls=1)
            return {"first call": 1e3 * first_call, **self.milliseconds(seconds)}
        finally:
            engine.release()


def measure(name: str, tiny: bool, file: Path) -> None:
    """Write the milliseconds of a shape to the file, again after each kind of layers."""
    bench, errors = Bench(name, tiny), {}
    weights = max(sum(p.numel() for p in layer.parameters()) for layer in bench.model.model.layers)
    rates = ceilings() if bench.on_gpu else (float("inf"), float("inf"))
    times = {"floor": bench.milliseconds(lambda work, _: floor_seconds(bench.model, work, *rates))}
    for layers in LAYERS:
        gc.collect()
        torch._dynamo.reset()
        if bench.on_gpu:
            torch.cuda.empty_cache()
        try:
            families = fused_decoder._FAMILIES if layers == HAND_FUSED else ()
            with mock.patch.object(fused_decoder, "_FAMILIES", families):
                times[layers] = bench.measure(layers)
        except Exception as error:
            traceback.print_exc(limit=-3)
            errors[layers] = f"{type(error).__name__}: {str(error)[:300]}"
        write_record({"layer_weights": weights, "ms": times, "errors": errors}, file)


def fused_ops_on_cpu(model: Any, runner: Any, settings: Any) -> fused_ops.FusedOps:
    """Replace `build_fused_ops`: engines on a CPU have no fused kernels."""
    return fused_ops.FusedOps(fused_ops.verified_ops(model, runner.cache, settings.max_num_seqs))


def print_table(name: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name}: {row['error']}", flush=True)
        return
    times, title = row["ms"], f"{name}, {row['layer_weights'] / 1e6:.0f} M weights per layer"
    print(f"{title:44}", *(f"{column:>11}" for column in times))
    for cell in ["first call", *times["floor"]]:
        found = (column.get(cell, float("nan")) for column in times.values())
        print(f"  {cell:42}", *(f"{ms:11.3f}" for ms in found))
    print(row["errors"] or "", flush=True)


def main() -> None:
    """Measure the shapes that the file does not have, until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, with commas")
    parser.add_argument("--record", type=Path, help="the JSON record, continued if it is there")
    parser.add_argument("--seconds", type=float, default=360, help="then no shape starts")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--child", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if not torch.cuda.is_available():
            executor.build_fused_ops = fused_ops_on_cpu
            fused_ops.CompiledLayers = partial(fused_ops.CompiledLayers, backend="eager")
        measure(args.child, args.tiny, args.out)
        return
    deadline = time.monotonic() + args.seconds
    record = {**header("decode_layers"), "shapes": {}}
    if args.record is not None and args.record.exists():
        record = json.loads(args.record.read_text())
    found, flags = record["shapes"], ["--tiny"] if args.tiny else []
    for name in args.only.split(","):
        if not {*found.get(name, {}).get("ms", ())} >= {*LAYERS} and time.monotonic() < deadline:
            found[name] = run_child(__file__, "--child", name, *flags, seconds=CHILD_SECONDS)
        write_record(record, args.record)
        print_table(name, found.get(name, {"error": "not measured"}))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
