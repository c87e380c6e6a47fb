"""Generation and scoring on a live model, beside what Transformers offers for it.

    python benchmarks/bench_generation.py                    # on a GPU: all workloads
    python benchmarks/bench_generation.py --device cpu       # on a CPU: the real trace, shrunk
    python benchmarks/bench_generation.py --only a,b --record a_and_b.json

Workloads, models and the floor are described in generation_workloads.py. Peers run in the same
process on the same model and requests: `generate` in static batches, and continuous batching
(`init_continuous_batching`) with flash-attn 2. A table for people, then one JSON line; with
--record the same in a file, written anew after every line of the table. A workload that fails is
named in both, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import generation_workloads as load
import numpy as np
import torch
from generation_peers import run_continuous, run_static
from generation_report import attempt, card, keep, note, quiet, record_to
from generation_workloads import Work
from nopad.inference import Engine, SamplingParams
from record import timed

REPEATS = 3
PATIENCE = 25.0
"""Seconds after which an open loop that does not keep up is given up."""


def ceilings() -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read and written) and bf16 matrix rate in FLOP/s, measured."""
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def best(call) -> float:
        call()
        return min(timed(lambda: [call() for _ in range(10)])[0] / 10 for _ in range(3))

    return 2 * len(x) / best(lambda: y.copy_(x)), 2 * 8192**3 / best(lambda: a @ b)


def params_of(work: Work) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.new]


def latencies(summary: dict[str, float]) -> dict[str, float]:
    """Time to first token and inter-token latency, median and p99, in seconds."""
    return {key: summary[key] for key in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")}


def run_engine(name: str, model, work: Work, floor: float, who: str = "nopad", **settings) -> float:
    """Cold once, then the median of several calls without any cached prefix."""
    if next(model.parameters()).is_cuda:
        settings = {"memory": 60 << 30} | settings
    engine = Engine(model, **settings)
    params = params_of(work)
    cold, _ = timed(lambda: engine.generate(work.prompts, params))
    first, times = engine.stats.summary(), []
    for _ in range(REPEATS):
        engine.reset_prefix_cache()
        engine.stats.reset()
        seconds, out = timed(lambda: engine.generate(work.prompts, params))
        assert [len(c.token_ids) for c in out] == work.new
        times.append(seconds)
    s = engine.stats.summary()
    seconds = statistics.median(times)
    note(
        name, who, seconds, work.new_tokens, floor, spread=max(times) - min(times),
        occupancy=s["occupancy"], padding=s["padding"], preemptions=s["preemptions"],
        graphs=first["graphs_captured"],
        cold=cold, setup_seconds=first["setup_seconds"], capture_seconds=first["capture_seconds"],
        **latencies(s),
    )  # fmt: skip
    engine.release()
    return seconds


def run_scoring(name: str, model) -> None:
    """(e) Four choices of one context: shared, beside padded batches with logits of all rows."""
    contexts, ends = load.choices(model.config.vocab_size)
    tokens = sum(len(e) for four in ends for e in four)
    engine = Engine(model, memory=20 << 30)
    engine.score(contexts, ends)
    engine.reset_prefix_cache()
    engine.stats.reset()
    seconds, scores = timed(lambda: engine.score(contexts, ends))
    ran = engine.stats.num_computed_tokens
    note(name, "nopad score", seconds, tokens, num_computed_tokens=ran, requests=4 * len(contexts))
    engine.release()
    pairs = [(c, e) for c, four in zip(contexts, ends, strict=True) for e in four]
    pairs.sort(key=lambda pair: -len(pair[0]) - len(pair[1]))

    @torch.no_grad()
    def plain() -> None:
        for start in range(0, len(pairs), 32):
            some = pairs[start : start + 32]
            wide = max(len(c) + len(e) for c, e in some)
            ids = torch.zeros(len(some), wide, dtype=torch.int64)
            for row, (c, e) in zip(ids, some, strict=True):
                row[: len(c) + len(e)] = torch.tensor(c + e)
            logits = model(ids.to(model.device)).logits.log_softmax(-1)
            for row, (c, e) in enumerate(some):
                at = torch.arange(len(c) - 1, len(c) + len(e) - 1, device=logits.device)
                logits[row, at, torch.tensor(e, device=logits.device)].sum().item()

    plain()
    seconds, _ = timed(plain)
    ran = sum(len(c) + len(e) for c, e in pairs)
    note(name, "padded batches of 32, all logits", seconds, tokens, num_computed_tokens=ran)
    assert all(s.error is None for four in scores for s in four)


def run_open_loop(name: str, model, work: Work, capacity: float) -> None:
    """(f) Requests at the trace's own times, scaled to a share of the engine's capacity."""
    assert work.arrivals is not None
    params = params_of(work)
    mean_gap = max(work.arrivals) / len(work.arrivals)
    engine = Engine(model, memory=40 << 30)
    engine.generate(work.prompts, params)
    for share in (0.5, 0.7, 0.9):
        scale = 1 / (capacity * share) / mean_gap
        engine.reset_prefix_cache()
        engine.stats.reset()
        start, sent, done = time.perf_counter(), 0, 0
        while done < len(work.prompts) and time.perf_counter() - start < PATIENCE:
            now = time.perf_counter() - start
            while sent < len(work.prompts) and work.arrivals[sent] * scale <= now:
                engine.add_request(work.prompts[sent], params[sent])
                sent += 1
            events = engine.step()
            done += sum(e.completion is not None for e in events)
            if not events and sent == done:
                time.sleep(0.0005)
        s = engine.stats.summary()
        note(
            name, f"nopad, {share:.0%} of capacity", time.perf_counter() - start,
            int(s["new_tokens"]), requests=done,
            **latencies(s),
        )  # fmt: skip
        if done < len(work.prompts):
            break
    engine.release()


def run_dial(name: str, model, work: Work) -> None:
    """(g) Both sides of the dial, turned on one engine: what more in a step gives, and costs."""
    engine = Engine(model, memory=60 << 30)
    params = params_of(work)
    engine.generate(work.prompts, params)  # captures the graphs of every size
    most, wide = engine.max_num_seqs, engine.max_num_batched_tokens
    turns = [(running, wide) for running in (16, 32, 64, 128, 256, most)]
    turns += [(128, tokens) for tokens in (256, 512, 1024, 2048, 4096)]
    for running, tokens in turns:
        engine.max_num_seqs, engine.max_num_batched_tokens = running, tokens
        engine.reset_prefix_cache()
        engine.stats.reset()
        seconds, _ = timed(lambda: engine.generate(work.prompts, params))
        s = engine.stats.summary()
        note(
            name, f"nopad, {running} running, {tokens} tokens a step", seconds, work.new_tokens,
            **latencies(s),
        )  # fmt: skip
    engine.release()


def static_open_loop(name: str, model, work: Work, capacity: float, batch: int = 16) -> None:
    """The same arrivals at half capacity through static batches, closed when full or 50 ms old.

    The clock is virtual: each batch starts when it is closed and the one before is done, and takes
    as long as it was measured to take.
    """
    assert work.arrivals is not None
    scale = 1 / (capacity * 0.5) / (max(work.arrivals) / len(work.arrivals))
    arrivals = [t * scale for t in work.arrivals]
    clock, place, first = 0.0, 0, []
    with quiet():
        while place < len(arrivals):
            stop = place + 1
            limit = max(clock, arrivals[place] + 0.05)
            while stop < len(arrivals) and stop - place < batch and arrivals[stop] <= limit:
                stop += 1
            closed = arrivals[stop - 1] if stop - place == batch else arrivals[place] + 0.05
            took = run_static(
                name, model, Work(work.prompts[place:stop], work.new[place:stop]), batch
            )
            clock = max(clock, closed) + took
            first += [clock - a for a in arrivals[place:stop]]
            place = stop
    note(
        name, f"static batches of {batch}, 50% of capacity", clock, work.new_tokens,
        answer_p50=float(np.percentile(first, 50)), answer_p99=float(np.percentile(first, 99)),
    )  # fmt: skip


@contextmanager
def attention(name: str):
    """Force an attention backend."""
    os.environ["NOPAD_ATTENTION"] = name
    try:
        yield
    finally:
        del os.environ["NOPAD_ATTENTION"]


def sample_of(work: Work, count: int) -> Work:
    chosen = np.random.default_rng(1).choice(len(work.new), count, replace=False)
    return Work([work.prompts[i] for i in chosen], [work.new[i] for i in chosen])


def bench_gpu(only: list[str]) -> None:
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    keep({"copy_bytes_per_second": bandwidth, "matrix_flops": rate})
    models = {}

    def model_of(workload: str):
        build = load.qwen3_600m if workload == "b" else load.llama_1b
        if build not in models:
            models[build] = build()
        return models[build]

    for workload in only:
        model = model_of(workload)

        def floor(work: Work, model=model) -> float:
            return load.floor_seconds(model, work, bandwidth, rate)

        run = RUNS[workload]
        attempt(workload, lambda run=run, model=model, floor=floor: run(model, floor))


def beside_continuous(name: str, model, work: Work, floor: float) -> float:
    """The engine, then continuous batching; how many times faster the engine is."""
    ours = run_engine(name, model, work, floor)
    theirs = attempt(name, lambda: run_continuous(name, model, work, floor))
    if theirs is not None:
        plain, first, warm = (round(seconds / ours, 3) for seconds in theirs)
        print(
            f"{name:8} {plain:.2f} times a plain call of continuous batching, {first:.2f} times "
            f"the first run on its manager, {warm:.2f} times it kept warm", flush=True,
        )  # fmt: skip
        keep(
            {
                "workload": name,
                "times_continuous_batching": plain,
                "times_continuous_batching_first_run": first,
                "times_continuous_batching_warm": warm,
            }
        )
    return ours


def bench_a(model, floor) -> None:
    work = load.lognormal(model.config.vocab_size)
    beside_continuous("a", model, work, floor(work))


def bench_b(model, floor) -> None:
    work = load.uniform(model.config.vocab_size)
    beside_continuous("b", model, work, floor(work))


def bench_flash(model, floor) -> None:
    work = load.lognormal(model.config.vocab_size)
    with attention("flash2"):
        run_engine("a", model, work, floor(work), "nopad, attention by flash-attn 2")


def bench_static(model, floor) -> None:
    work = sample_of(load.lognormal(model.config.vocab_size), 64)
    run_static("a", model, work, 64)


def bench_trace(model, floor) -> None:
    """(c) and, at its arrival times, (f)."""
    work = load.trace(model.config.vocab_size, 256)
    if work is None:
        raise ValueError("no trace here; set NOPAD_SHARED")
    work = Work([p[:7000] for p in work.prompts], work.new, work.arrivals)
    capacity = len(work.new) / run_engine("c", model, work, floor(work))
    some = sample_of(work, 32)
    beside_continuous("c, 32 of its requests", model, some, floor(some))
    attempt("f", lambda: run_open_loop("f", model, work, capacity))
    assert work.arrivals is not None
    few = Work(work.prompts[:24], work.new[:24], work.arrivals[:24])
    attempt("f", lambda: static_open_loop("f", model, few, capacity))


def bench_few_shot(model, floor) -> None:
    work = load.few_shot(model.config.vocab_size)
    beside_continuous("d", model, work, 0.0)


RUNS = {
    "a": bench_a,
    "b": bench_b,
    "k": bench_flash,
    "c": bench_trace,
    "d": bench_few_shot,
    "e": lambda model, floor: run_scoring("e", model),
    "s": bench_static,
    "g": lambda model, floor: run_dial("g", model, load.lognormal(model.config.vocab_size)),
}


def bench_cpu() -> None:
    model = load.llama_cpu()
    work = load.trace(model.config.vocab_size, 64, shrink=8)
    if work is None:
        raise SystemExit("the CPU workload needs the Azure trace; set NOPAD_SHARED")
    work = Work([p[:1800] for p in work.prompts], work.new)
    ours = run_engine("c/8", model, work, 0.0, max_num_seqs=64, max_num_batched_tokens=2048)
    static = run_static("c/8", model, work, 16)
    print(f"{static / ours:.2f} times static batches")
    keep({"times_static_batches": round(static / ours, 2)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only",
        default="a,b,k,c,d,e,s,g",
        help="workloads, in this order; c: with f; k: (a) with flash-attn 2 inside;\n"
        "s: (a) in static batches; g: (a) over the dial",
    )
    parser.add_argument("--record", type=Path, help="a file for the results so far")
    given = parser.parse_args()
    record_to(given.record)
    if given.device == "cuda":
        bench_gpu(given.only.split(","))
    else:
        bench_cpu()
    print(json.dumps(card()))


if __name__ == "__main__":
    main()
