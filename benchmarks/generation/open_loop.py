"""Open loops: requests arrive at their own times, whether or not earlier ones are done.

    o   the first 256 requests of (a), at exponential gaps: 50 to 190 a second, drawn as vLLM's are
    m   conversations in bursts: each turn's prompt begins with the turns before it
    q   90 % of capacity for a minute: does the queue grow?

The clock of a request starts when it is due. One setting for all: `TARGET_ITL`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from nopad.inference import Engine, SamplingParams

from . import workloads
from .report import add_row
from .workloads import Workload

TARGET_ITL = 0.008
"""Target inter-token latency in seconds; prefills are chunked to meet it."""
REPEATS = 3
RATES = (50.0, 100.0, 150.0, 190.0)
TURNS, CONVERSATIONS, BURST = 4, 64, 16


class Clients:
    """Requests due at given times, and when their tokens came."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.queue_lengths: list[tuple[float, int]] = []
        """Seconds since the start and requests that wait or run, a sample a second."""
        self.ttft: list[float] = []
        """Seconds to the first token, of each request."""

    def run(self, work: Workload, due: np.ndarray) -> dict[str, float]:
        """Submit each request when it is due; return seconds and the percentiles of latencies."""
        params = [SamplingParams(temperature=0, max_tokens=n) for n in work.new]
        times: list[list[float]] = [[] for _ in work.new]
        index_of: dict[int, int] = {}
        self.queue_lengths.clear()
        gc.collect()
        gc.freeze()  # as a server does
        start, sent, done = time.perf_counter(), 0, 0
        while done < len(work.new):
            now = time.perf_counter() - start
            while sent < len(due) and due[sent] <= now:
                index_of[self.engine.add_request(work.prompts[sent], params[sent])] = sent
                sent += 1
            if len(self.queue_lengths) <= now:
                self.queue_lengths.append((now, sent - done))
            events = self.engine.step()
            now = time.perf_counter() - start
            for event in events:
                times[index_of[event.request_id]] += [now] * len(event.token_ids)
                done += event.completion is not None
            if not events and sent == done:
                time.sleep(0.0002)
        assert [len(t) for t in times] == work.new
        seconds = time.perf_counter() - start
        self.ttft = [t[0] - begin for t, begin in zip(times, due, strict=True)]
        itl = np.concatenate([np.diff(t) for t in times])
        return {"seconds": seconds, **percentiles("ttft", self.ttft), **percentiles("itl", itl)}


def percentiles(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return median and p99."""
    return {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 99)}


def run_rates(name: str, model) -> None:
    """(o) Poisson arrivals at absolute rates; the median of three repeats, after a warm one."""
    work = workloads.lognormal(model.config.vocab_size)
    work = Workload(work.prompts[:256], work.new[:256])
    engine = Engine(model, memory=40 << 30, target_itl=TARGET_ITL)
    clients = Clients(engine)
    clients.run(work, np.zeros(len(work.new)))  # all at once, as the peer is warmed
    for rate in RATES:
        due = np.random.default_rng(0).exponential(1 / rate, len(work.new)).cumsum()
        _report(name, f"nopad, {rate:g} a second", engine, lambda d=due: clients.run(work, d), work)
    engine.release()


def run_conversations(name: str, model) -> None:
    """(m) Bursts of conversations; a turn is due a second after the one before it."""
    engine = Engine(model, memory=40 << 30, target_itl=TARGET_ITL)
    clients = Clients(engine)
    rng = np.random.default_rng(0)
    turns = rng.integers(0, model.config.vocab_size, (CONVERSATIONS, TURNS, 120)).tolist()
    order = [(c, t) for t in range(TURNS) for c in range(CONVERSATIONS)]
    prompts = [list(chain(*turns[c][: t + 1])) for c, t in order]
    due = np.array([t * 1.0 + 0.1 * (c // BURST) for c, t in order])
    work = Workload(prompts, [64] * len(prompts))
    clients.run(work, due)
    _report(
        name, f"nopad, {BURST} conversations at once", engine, lambda: clients.run(work, due), work
    )
    engine.release()


def run_at_capacity(name: str, model, seconds: float = 60.0) -> None:
    """(q) Requests of (a) at 90 % of the rate that a full queue is worked off with."""
    work = workloads.lognormal(model.config.vocab_size)
    engine = Engine(model, memory=40 << 30, target_itl=TARGET_ITL)
    clients = Clients(engine)
    clients.run(work, np.zeros(len(work.new)))
    engine.reset_prefix_cache()
    rate = 0.9 * len(work.new) / clients.run(work, np.zeros(len(work.new)))["seconds"]
    engine.reset_prefix_cache()
    count = int(rate * seconds)
    many = workloads.lognormal(model.config.vocab_size, count, seed=1)
    due = np.random.default_rng(0).exponential(1 / rate, count).cumsum()
    result = clients.run(many, due)
    in_flight = np.array_split([length for _, length in clients.queue_lengths], 3)
    ttft = np.array_split(clients.ttft, 3)
    add_row(
        name, f"nopad, {rate:.0f} a second (90 % of capacity)", result.pop("seconds"),
        many.new_tokens, in_flight_by_third=[round(float(part.mean()), 1) for part in in_flight],
        ttft_p50_by_third=[round(float(np.median(part)), 5) for part in ttft], **result,
    )  # fmt: skip
    engine.release()


def _report(
    name: str, who: str, engine: Engine, run: Callable[[], dict[str, float]], work: Workload
) -> None:
    results = []
    for _ in range(REPEATS):
        engine.reset_prefix_cache()
        results.append(run())
    middle = {key: statistics.median(r[key] for r in results) for key in results[0]}
    spread = {f"{key}_all": [round(r[key], 5) for r in results] for key in results[0]}
    add_row(name, who, middle.pop("seconds"), work.new_tokens, target_itl=TARGET_ITL,
            **middle, **spread)  # fmt: skip
