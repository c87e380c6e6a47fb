"""Calls from several threads: each gets its own results, and the model is returned as it was."""

from __future__ import annotations

import sys
from threading import Barrier, Thread

import pytest
from nopad.inference import DataParallelEngine, Engine

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = [[5 + k, 6, 7 + k, *range(20, 40)] for k in range(4)]


@pytest.fixture(autouse=True)
def switch_often():
    """Threads that change places every few bytecodes meet wherever they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def model(tiny):
    model = tiny("llama").train()
    yield model
    model.eval()


def in_threads(calls) -> list:
    """Run the calls at once; return their results, or what they raised."""
    results, start = [None] * len(calls), Barrier(len(calls))

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [Thread(target=run, args=(k,), daemon=True) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call does not return"
    return results


@pytest.mark.parametrize("num_engines", [1, 2])
def test_calls_from_several_threads_get_what_they_get_alone(model, num_engines):
    want = [Engine(model).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    scores = Engine(model).score(PROMPTS, [[8, 9]] * 4)
    engines = [Engine(model, page_size=16) for _ in range(num_engines)]
    attention = model.config._attn_implementation

    def generate(k: int) -> list[list[int]]:
        return [engines[k % num_engines].generate([PROMPTS[k]], GREEDY)[0].token_ids for _ in "abc"]

    def stream(k: int) -> list[int]:
        events = engines[k % num_engines].stream([PROMPTS[k]], GREEDY)
        return [token for event in events for token in event.token_ids]

    calls = [lambda k=k: generate(k) for k in range(3)]
    calls += [lambda: stream(3), lambda: engines[-1].score(PROMPTS, [[8, 9]] * 4)]
    *several, streamed, scored = in_threads(calls)
    assert several == [[want[k]] * 3 for k in range(3)]
    assert streamed == want[3]
    assert [s.logprob for s in scored] == pytest.approx([s.logprob for s in scores], abs=1e-4)
    assert model.config._attn_implementation == attention
    assert all(module.training for module in model.modules())
    for engine in engines:  # the cached prefixes are right, too
        assert [c.token_ids for c in engine.generate(PROMPTS, GREEDY)] == want
        engine._loop.scheduler.check()


def test_requests_added_from_several_threads_all_end(model):
    engine = Engine(model, page_size=16)
    want = [c.token_ids for c in engine.generate(PROMPTS, GREEDY)]

    def add_and_step(k: int):
        request_id = engine.add_request(PROMPTS[k], GREEDY)
        return request_id, [event for _ in range(5) for event in engine.step()]

    parts = in_threads([lambda k=k: add_and_step(k) for k in range(4)])
    events = [event for _, part in parts for event in part]
    while engine._loop.busy:
        events += engine.step()
    done = {e.request_id: e.completion.token_ids for e in events if e.completion is not None}
    assert [done[request_id] for request_id, _ in parts] == want


def test_a_call_inside_a_stream_of_the_same_thread_does_not_wait_for_itself(model):
    engine = Engine(model)
    for _ in engine.stream([PROMPTS[0]], GREEDY):
        assert engine.generate([PROMPTS[1]], GREEDY)[0].error is None


def test_ranks_cannot_share_calls_of_two_threads(model, monkeypatch):
    """Two threads would meet the other ranks in any order: the second one is refused."""
    monkeypatch.setattr("nopad.inference.data_parallel.world_size", lambda: 2)
    ranks = DataParallelEngine(Engine(model))

    def inside(*_):
        (refused,) = in_threads([lambda: ranks.generate([PROMPTS[0]], GREEDY)])
        return refused

    monkeypatch.setattr("nopad.inference.data_parallel.run_on_all_ranks", inside)
    refused = ranks.generate([PROMPTS[0]], GREEDY)
    assert isinstance(refused, RuntimeError) and "another thread" in str(refused)
