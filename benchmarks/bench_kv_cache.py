"""Decoding over long contexts with keys and values in 8 bits, beside the model's own dtype.

    python benchmarks/bench_kv_cache.py --record kv_cache.json   # on a GPU, about 5 minutes
    python benchmarks/bench_kv_cache.py --tiny                   # on a CPU

The shapes of Llama-3.2-1B (256 sequences) and Llama-3.1-8B (128), with random weights and prompts
of 4,096 tokens. A first call computes the prompts; the timed calls find them in the prefix cache
and decode. The floor reads weights, keys and values once per step at the copy bandwidth. Reported
too: how many tokens a GiB of pages holds, and on how many of its first 16 tokens a completion
agrees with that of the model's own dtype. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_generation import ceilings
from generation.floor import floor_seconds
from generation.workloads import Workload, llama_1b, llama_8b, llama_cpu
from nopad.inference import Engine, SamplingParams
from record import header, timed, write_record

KV_DTYPES = (None, "int8", "fp8")
REPEATS = 3
COMPARED = 16
RESULTS: list[dict[str, Any]] = []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="1b,8b", help="shapes, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="few short sequences, for a CPU")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    rates = (float("inf"), float("inf")) if args.tiny else ceilings()
    runs = {"1b": (llama_1b, 256, 4096, 128), "8b": (llama_8b, 128, 4096, 128)}
    for name in args.only.split(","):
        build, count, length, new = (llama_cpu, 4, 200, 24) if args.tiny else runs[name]
        run_shape(name, build(), count, length, new, rates)
        gc.collect()
        torch.cuda.empty_cache()
    record = {**header("kv_cache"), "results": RESULTS}
    write_record(record, args.record)
    print(json.dumps(record))


def run_shape(
    name: str, model: Any, count: int, length: int, new: int, rates: tuple[float, float]
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, model.config.vocab_size, length).tolist() for _ in range(count)]
    work, prefill = Workload(prompts, [new] * count), Workload(prompts, [1] * count)
    head_dim, itemsize = model.config.head_dim, next(model.parameters()).element_size()
    exact: Any = None
    baseline = 0.0
    for kv_dtype in KV_DTYPES:
        number = itemsize if kv_dtype is None else 1 + 2 / head_dim  # with its part of a scale
        floor = floor_seconds(model, work, *rates, number)
        floor -= floor_seconds(model, prefill, *rates, number)
        engine: Any = Engine(  # the length leaves pages for copies beside the cached prompts
            model, max_num_seqs=count, max_model_len=length + new + 513, kv_dtype=kv_dtype,
            memory=0.9 if torch.cuda.is_available() else 1 << 30,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine.generate(prompts, params)
        engine.stats.reset()
        decode = partial(engine.generate, prompts, params)
        timings = [timed(decode) for _ in range(REPEATS)]
        times, got = [seconds for seconds, _ in timings], timings[-1][1]
        exact = exact or got
        seconds, cache = statistics.median(times), engine._executor.runner.cache
        baseline = baseline or seconds
        add_row(
            shape=name, kv_dtype=kv_dtype or "own", sequences=count, prompt=length, new=new,
            tokens_per_second=count * new / seconds, times=baseline / seconds,
            spread=(max(times) - min(times)) / seconds, share_of_floor=floor / seconds,
            pages=cache.num_pages, tokens_per_gib=cache.page_size * 2**30 / cache.page_bytes,
            prompts_cached=engine.stats.prefix_hit_tokens / (REPEATS * count * length),
            preemptions=engine.stats.preemptions, agreeing=agreement(exact, got),
        )  # fmt: skip
        engine.release()


def agreement(exact: Any, got: Any) -> float:
    """Return how many of the first tokens agree before the first that differs, as a fraction."""
    equal = [np.equal(a.token_ids, b.token_ids)[:COMPARED] for a, b in zip(exact, got, strict=True)]
    return float(np.mean([np.minimum.accumulate(row).mean() for row in equal]))


def add_row(**row: Any) -> None:
    RESULTS.append(row)
    print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
