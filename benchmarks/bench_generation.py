"""Speed of generation and scoring on a live model, beside Transformers' `generate`.

    python benchmarks/bench_generation.py                    # on a GPU: all workloads
    python benchmarks/bench_generation.py --device cpu       # on a CPU: the real trace, shrunk
    python benchmarks/bench_generation.py --only a,b --record a_and_b.json

generation/workloads.py describes the workloads and the models, generation/floor.py the floor (a
lower bound of the time). The peers run in the same process on the same model and requests:
`generate` in static batches, and continuous batching (`init_continuous_batching`) with flash-attn
2. Prints a table, and one JSON line last; with --record the JSON also goes to a file, which is
rewritten after every row. A workload that fails is reported in both, and the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from generation import open_loop, workloads
from generation.first_call import run_first_call
from generation.floor import floor_seconds
from generation.mixed_steps import run_mixed_steps
from generation.peers import peers_run, run_continuous, run_static, skip_peers
from generation.report import (
    add_result,
    add_row,
    add_vllm,
    build_record,
    set_record_file,
    try_workload,
)
from generation.workloads import Workload
from nopad.inference import Completion, Engine, SamplingParams
from record import timed

REPEATS = 3


def ceilings() -> tuple[float, float]:
    """Measure copy bandwidth in bytes/s (read and written) and bf16 matrix rate in FLOP/s."""
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def best_time(call) -> float:
        call()
        return min(timed(lambda: [call() for _ in range(10)])[0] / 10 for _ in range(3))

    return 2 * len(x) / best_time(lambda: y.copy_(x)), 2 * 8192**3 / best_time(lambda: a @ b)


def sampling_params(work: Workload) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=n) for n in work.new]


def latencies(summary: dict[str, float]) -> dict[str, float]:
    """Return time to first token and inter-token latency, median and p99, in seconds."""
    return {key: summary[key] for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")}


def run_engine(
    name: str,
    model,
    work: Workload,
    floor: float,
    who: str = "nopad",
    **settings,
) -> float:
    """Time a cold call, and the median of several warm calls with an empty prefix cache."""
    if next(model.parameters()).is_cuda:
        settings = {"memory": 60 << 30} | settings
    engine = Engine(model, **settings)
    params = sampling_params(work)

    def generate() -> list[Completion]:
        return engine.generate(work.prompts, params)

    cold, _ = timed(generate)
    first, times = engine.stats.summary(), []
    for _ in range(REPEATS):
        engine.reset_prefix_cache()
        engine.stats.reset()
        seconds, out = timed(generate)
        assert [len(c.token_ids) for c in out] == work.new
        times.append(seconds)
    s = engine.stats.summary()
    seconds = statistics.median(times)
    add_row(
        name, who, seconds, work.new_tokens, floor, spread=max(times) - min(times),
        occupancy=s["occupancy"], padding=s["padding"], preemptions=s["preemptions"],
        graphs=first["graphs_captured"],
        cold=cold, setup_seconds=first["setup_seconds"], capture_seconds=first["capture_seconds"],
        **latencies(s),
    )  # fmt: skip
    engine.release()
    return seconds


def run_scoring(name: str, model) -> None:
    """(e) Score four continuations per context, beside padded batches with all logits."""
    contexts, continuations = workloads.choices(model.config.vocab_size)
    tokens = sum(len(ids) for choices in continuations for ids in choices)
    engine = Engine(model, memory=20 << 30)
    engine.score(contexts, continuations)
    engine.reset_prefix_cache()
    engine.stats.reset()
    seconds, scores = timed(lambda: engine.score(contexts, continuations))
    ran = engine.stats.num_computed_tokens
    add_row(
        name, "nopad score", seconds, tokens, num_computed_tokens=ran, requests=4 * len(contexts)
    )
    engine.release()
    if not peers_run():
        return
    pairs = [(c, e) for c, four in zip(contexts, continuations, strict=True) for e in four]
    pairs.sort(key=lambda pair: -len(pair[0]) - len(pair[1]))

    @torch.no_grad()
    def score_padded() -> None:
        for start in range(0, len(pairs), 32):
            batch = pairs[start : start + 32]
            width = max(len(c) + len(e) for c, e in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, (c, e) in zip(ids, batch, strict=True):
                row[: len(c) + len(e)] = torch.tensor(c + e)
            logits = model(ids.to(model.device)).logits.log_softmax(-1)
            for row, (c, e) in enumerate(batch):
                positions = torch.arange(len(c) - 1, len(c) + len(e) - 1, device=logits.device)
                logits[row, positions, torch.tensor(e, device=logits.device)].sum().item()

    score_padded()
    seconds, _ = timed(score_padded)
    ran = sum(len(c) + len(e) for c, e in pairs)
    add_row(name, "padded batches of 32, all logits", seconds, tokens, num_computed_tokens=ran)
    assert all(s.error is None for four in scores for s in four)


@contextmanager
def attention(name: str):
    """Force an attention backend."""
    os.environ["NOPAD_ATTENTION"] = name
    try:
        yield
    finally:
        del os.environ["NOPAD_ATTENTION"]


def subsample(work: Workload, count: int) -> Workload:
    indices = np.random.default_rng(1).choice(len(work.new), count, replace=False)
    return Workload([work.prompts[i] for i in indices], [work.new[i] for i in indices])


def bench_gpu(only: list[str]) -> None:
    bandwidth, rate = ceilings()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, bf16 matrix rate {rate / 1e12:.0f} TFLOP/s")
    add_result({"copy_bytes_per_second": bandwidth, "matrix_flops": rate})
    models = {}

    def model_of(workload: str):
        build = workloads.qwen3_600m if workload == "b" else workloads.llama_1b
        if build not in models:
            models[build] = build()
        return models[build]

    for workload in only:
        model = model_of(workload)

        def floor(work: Workload, model=model) -> float:
            return floor_seconds(model, work, bandwidth, rate)

        run = RUNS[workload]
        try_workload(workload, lambda run=run, model=model, floor=floor: run(model, floor))


def compare_continuous(name: str, model, work: Workload, floor: float) -> float:
    """Time the engine and continuous batching, and print how many times faster the engine is."""
    ours = run_engine(name, model, work, floor)
    if not peers_run():
        return ours
    theirs = try_workload(name, lambda: run_continuous(name, model, work, floor))
    if theirs is not None:
        plain, first, warm = (round(seconds / ours, 3) for seconds in theirs)
        print(
            f"{name:8} {plain:.2f} times as fast as a plain call of continuous batching, "
            f"{first:.2f} times its first run, {warm:.2f} times its second run", flush=True,
        )  # fmt: skip
        add_result(
            {
                "workload": name,
                "times_continuous_batching": plain,
                "times_continuous_batching_first_run": first,
                "times_continuous_batching_warm": warm,
            }
        )
    return ours


def bench_a(model, floor) -> None:
    work = workloads.lognormal(model.config.vocab_size)
    compare_continuous("a", model, work, floor(work))


def bench_b(model, floor) -> None:
    work = workloads.uniform(model.config.vocab_size)
    compare_continuous("b", model, work, floor(work))


def bench_flash(model, floor) -> None:
    work = workloads.lognormal(model.config.vocab_size)
    with attention("flash2"):
        run_engine("a", model, work, floor(work), "nopad, attention by flash-attn 2")


def bench_static(model, floor) -> None:
    if peers_run():
        work = subsample(workloads.lognormal(model.config.vocab_size), 64)
        run_static("a", model, work, 64)


def bench_trace(model, floor) -> None:
    """(c), and a sample of it beside continuous batching, which takes too long for all of it."""
    work = workloads.trace(model.config.vocab_size, 256)
    if work is None:
        raise ValueError("the Azure trace is missing; set NOPAD_SHARED")
    work = Workload([p[:7000] for p in work.prompts], work.new)
    run_engine("c", model, work, floor(work))
    if peers_run():
        sample = subsample(work, 32)
        compare_continuous("c, 32 of its requests", model, sample, floor(sample))


def bench_few_shot(model, floor) -> None:
    work = workloads.few_shot(model.config.vocab_size)
    compare_continuous("d", model, work, 0.0)


RUNS = {
    "a": bench_a,
    "b": bench_b,
    "k": bench_flash,
    "c": bench_trace,
    "d": bench_few_shot,
    "e": lambda model, floor: run_scoring("e", model),
    "s": bench_static,
    "o": lambda model, floor: open_loop.run_rates("o", model),
    "m": lambda model, floor: open_loop.run_conversations("m", model),
    "q": lambda model, floor: open_loop.run_at_capacity("q", model),
    "p": lambda model, floor: run_mixed_steps("p", model),
    "i": lambda model, floor: run_first_call("i"),
}


def bench_cpu() -> None:
    model = workloads.llama_cpu()
    work = workloads.trace(model.config.vocab_size, 64, shrink=8)
    if work is None:
        raise SystemExit("the CPU workload needs the Azure trace; set NOPAD_SHARED")
    work = Workload([p[:1800] for p in work.prompts], work.new)
    ours = run_engine("c/8", model, work, 0.0, max_num_seqs=64, max_num_batched_tokens=2048)
    if not peers_run():
        return
    static = run_static("c/8", model, work, 16)
    print(f"{static / ours:.2f} times as fast as static batches")
    add_result({"times_static_batches": round(static / ours, 2)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only",
        default="i,a,b,k,c,d,e,s,o,m,q,p",
        help="workloads, in this order; k: (a) with flash-attn 2 attention;\n"
        "s: (a) in static batches;\n"
        "o, m, q: open loops (Poisson arrivals, conversations, a minute near capacity);\n"
        "p: a prompt joins 128 decodes; i: the first call in a new process",
    )
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--no-peers", action="store_true", help="omit Transformers")
    parser.add_argument(
        "--vllm",
        type=Path,
        help="JSON lines that vLLM wrote in the same hour, to join into the record",
    )
    args = parser.parse_args()
    if args.no_peers:
        skip_peers()
    set_record_file(args.record)
    if args.vllm is not None:
        add_vllm(args.vllm)
    if args.device == "cuda":
        bench_gpu(args.only.split(","))
    else:
        bench_cpu()
    print(json.dumps(build_record()))


if __name__ == "__main__":
    main()
