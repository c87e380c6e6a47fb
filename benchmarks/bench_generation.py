"""Generation and scoring on a live model, beside what Transformers offers for it.

    python benchmarks/bench_generation.py                    # on a GPU: all workloads
    python benchmarks/bench_generation.py --device cpu       # on a CPU: the real trace, shrunk
    python benchmarks/bench_generation.py --only a,b

Workloads, models and the floor are described in generation_workloads.py. Peers run in the same
process on the same model and requests: `generate` in static batches, and continuous batching
(`init_continuous_batching`) with flash-attn 2. A table for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from contextlib import contextmanager

import generation_workloads as load
import numpy as np
import torch
from generation_workloads import Work
from nopad.inference import Engine, SamplingParams

RESULTS: list[dict] = []
REPEATS = 3


def note(workload: str, who: str, seconds: float, tokens: int, floor: float = 0.0, **more) -> None:
    """Print a line of the table and keep it for the record."""
    row = {"workload": workload, "who": who, "seconds": round(seconds, 3), "tokens": tokens}
    row["tokens_per_second"] = round(tokens / seconds, 1)
    if floor:
        row["share_of_floor"] = round(floor / seconds, 3)
    row |= {k: round(v, 5) if isinstance(v, float) else v for k, v in more.items()}
    RESULTS.append(row)
    share = f"{row.get('share_of_floor', 0):6.1%}" if floor else "      "
    extra = "  ".join(f"{k} {v}" for k, v in row.items() if k in more)
    print(
        f"{workload:8} {who:38} {seconds:8.3f} s {tokens / seconds:10.0f} tok/s {share}  {extra}",
        flush=True,
    )


def timed(call) -> tuple[float, object]:
    """Seconds a call takes: by the wall on a GPU, of processor time on a CPU others may share."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    out = call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, out


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


def run_engine(name: str, model, work: Work, floor: float, who: str = "nopad", **settings) -> float:
    """Cold once, then the median of several calls without any cached prefix."""
    if next(model.parameters()).is_cuda:
        settings = {"memory": 60 << 30} | settings
    engine = Engine(model, **settings)
    params = params_of(work)
    cold, _ = timed(lambda: engine.generate(work.prompts, params))
    captured, times = engine.stats.graphs_captured, []
    for _ in range(REPEATS):
        engine._machine.loop.scheduler.pages.forget()
        engine.stats.reset()
        seconds, out = timed(lambda: engine.generate(work.prompts, params))
        assert [len(c.tokens) for c in out] == work.new
        times.append(seconds)
    s = engine.stats.summary()
    seconds = statistics.median(times)
    note(
        name, who, seconds, work.new_tokens, floor, cold=cold, spread=max(times) - min(times),
        occupancy=s["occupancy"], padding=s["padding"], preemptions=s["preemptions"],
        graphs=captured, ttft_p50=s["first_token_p50"], ttft_p99=s["first_token_p99"],
        itl_p50=s["between_tokens_p50"], itl_p99=s["between_tokens_p99"],
    )  # fmt: skip
    engine.release()
    return seconds


def run_continuous(name: str, model, work: Work, floor: float) -> float:
    """Transformers' continuous batching: cold, then kept warm on the same manager."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=max(work.new), eos_token_id=-1)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("flash_attention_2")
    except Exception as error:
        print(f"{name:8} continuous batching without flash-attn 2: {type(error).__name__}")

    def serve(manager) -> None:
        for prompt, new in zip(work.prompts, work.new, strict=True):
            manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
        done = 0
        while done < len(work.prompts):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, "continuous batching failed"
            done += result.is_finished()

    def whole() -> tuple[float, float]:
        with model.continuous_batching_context_manager(generation_config=config) as manager:
            first, _ = timed(lambda: serve(manager))
            return first, timed(lambda: serve(manager))[0]

    start, (first, warm) = timed(whole)
    del start
    model.set_attn_implementation(before)
    note(name, "transformers continuous batching", warm, work.new_tokens, floor, cold=first)
    gc.collect()
    torch.cuda.empty_cache()
    return warm


@torch.no_grad()
def run_static(name: str, model, work: Work, batch: int) -> float:
    """Transformers' generate on padded batches, in order of arrival; each runs to its longest."""
    device = next(model.parameters()).device

    def go() -> None:
        for start in range(0, len(work.prompts), batch):
            prompts, new = work.prompts[start : start + batch], work.new[start : start + batch]
            wide = max(map(len, prompts))
            ids = torch.tensor([[0] * (wide - len(p)) + p for p in prompts], device=device)
            mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts])
            model.generate(
                ids, attention_mask=mask.to(device), max_new_tokens=max(new), do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    seconds, _ = timed(go)
    note(
        name,
        f"transformers generate, batch {batch}",
        seconds,
        work.new_tokens,
        requests=len(work.new),
    )
    return seconds


def run_scoring(name: str, model) -> None:
    """(e) Four choices of one context: shared, beside padded batches with logits of all rows."""
    contexts, ends = load.choices(model.config.vocab_size)
    tokens = sum(len(e) for four in ends for e in four)
    engine = Engine(model, memory=20 << 30)
    engine.score(contexts, ends)
    engine._machine.loop.scheduler.pages.forget()
    engine.stats.reset()
    seconds, scores = timed(lambda: engine.score(contexts, ends))
    ran = engine.stats.tokens_run
    note(name, "nopad score", seconds, tokens, tokens_run=ran, requests=4 * len(contexts))
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
    note(name, "padded batches of 32, all logits", seconds, tokens, tokens_run=ran)
    assert all(s.error is None for four in scores for s in four)


def run_open_loop(name: str, model, work: Work, capacity: float) -> None:
    """(f) Requests at the trace's own times, scaled to a share of the engine's capacity."""
    assert work.arrivals is not None
    params = params_of(work)
    mean_gap = max(work.arrivals) / len(work.arrivals)
    for share in (0.5, 0.7, 0.9):
        scale = 1 / (capacity * share) / mean_gap
        engine = Engine(model, memory=60 << 30)
        engine.generate(work.prompts[:64], params[:64])
        engine._machine.loop.scheduler.pages.forget()
        engine.stats.reset()
        start, sent, done = time.perf_counter(), 0, 0
        while done < len(work.prompts):
            now = time.perf_counter() - start
            while sent < len(work.prompts) and work.arrivals[sent] * scale <= now:
                engine.submit(work.prompts[sent], params[sent])
                sent += 1
            events = engine.step()
            done += sum(e.completion is not None for e in events)
            if not events and sent == done:
                time.sleep(0.0005)
        seconds = time.perf_counter() - start
        s = engine.stats.summary()
        note(
            name, f"nopad, {share:.0%} of capacity", seconds, work.new_tokens,
            ttft_p50=s["first_token_p50"], ttft_p99=s["first_token_p99"],
            itl_p50=s["between_tokens_p50"], itl_p99=s["between_tokens_p99"],
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
def quiet():
    """Leave what is measured inside out of the table."""
    global print
    kept, builtin = list(RESULTS), print
    print = lambda *_, **__: None  # noqa: E731
    try:
        yield
    finally:
        print = builtin
        RESULTS[:] = kept


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


def bench_gpu(only: set[str]) -> None:
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    RESULTS.append({"copy_bytes_per_second": bandwidth, "matrix_flops": rate})
    model = load.llama_1b()
    vocabulary = model.config.vocab_size
    if "a" in only:
        work = load.lognormal(vocabulary)
        floor = load.floor_seconds(model, work, bandwidth, rate)
        run_engine("a", model, work, floor)
        run_continuous("a", model, work, floor)
    if "k" in only:
        work = load.lognormal(vocabulary)
        floor = load.floor_seconds(model, work, bandwidth, rate)
        with attention("flash2"):
            run_engine("a", model, work, floor, "nopad, attention by flash-attn 2")
    if "s" in only:
        run_static("a", model, sample_of(load.lognormal(vocabulary), 64), 32)
    if "d" in only:
        work = load.few_shot(vocabulary)
        run_engine("d", model, work, 0.0)
        run_continuous("d", model, work, 0.0)
    if "e" in only:
        run_scoring("e", model)
    trace = load.trace(vocabulary, 256) if {"c", "f"} & only else None
    if trace is not None:
        trace = Work([p[:7000] for p in trace.prompts], trace.new, trace.arrivals)
        floor = load.floor_seconds(model, trace, bandwidth, rate)
        seconds = run_engine("c", model, trace, floor)
        if "c" in only:
            run_continuous("c", model, trace, floor)
        if "f" in only:
            run_open_loop("f", model, trace, len(trace.new) / seconds)
            few = Work(trace.prompts[:48], trace.new[:48], trace.arrivals[:48])
            static_open_loop("f", model, few, len(trace.new) / seconds)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if "b" in only:
        model = load.qwen3_600m()
        work = load.uniform(model.config.vocab_size)
        floor = load.floor_seconds(model, work, bandwidth, rate)
        run_engine("b", model, work, floor)
        run_continuous("b", model, work, floor)


def bench_cpu() -> None:
    model = load.llama_cpu()
    work = load.trace(model.config.vocab_size, 64, shrink=8)
    if work is None:
        raise SystemExit("the CPU workload needs the Azure trace; set NOPAD_SHARED")
    work = Work([p[:1800] for p in work.prompts], work.new)
    ours = run_engine("c/8", model, work, 0.0, max_running=64, tokens_per_step=2048)
    static = run_static("c/8", model, work, 16)
    print(f"{static / ours:.2f} times static batches")
    RESULTS.append({"times_static_batches": round(static / ours, 2)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only",
        default="a,k,s,d,e,c,f,b",
        help="workloads, k: (a) with flash-attn 2 inside, s: (a) in static batches",
    )
    given = parser.parse_args()
    if given.device == "cuda":
        bench_gpu(set(given.only.split(",")))
        machine = torch.cuda.get_device_name()
    else:
        bench_cpu()
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    import transformers

    print(json.dumps({
        "bench": "generation", "machine": machine, "torch": torch.__version__,
        "transformers": transformers.__version__, "results": RESULTS,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
