"""The engine's figures are right, whatever changes while requests run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nopad.inference import Engine, SamplingParams
from nopad.inference.metrics.stats import RingBuffer
from nopad.inference.requests.request import Request

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
PAGE = 16 * 2 * 2 * 2 * 8 * 4


def test_a_changed_limit_does_not_change_the_steps_before_it(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=4)
    engine.generate([[5, 6, i] for i in range(7, 10)], GREEDY)
    assert engine.stats.occupancy == 3 / 4
    engine.max_num_seqs = 1
    engine.generate([[5, 6, i] for i in range(7, 10)], GREEDY)
    assert engine.stats.occupancy == (5 * 3 / 4 + 15) / 20


def test_no_more_than_all_rows_and_pages_are_ever_in_use(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=4, memory=8 * PAGE)
    for i in range(4):
        engine.add_request([5, 6, i] * 9, GREEDY)
    engine.step()
    engine.max_num_seqs = 1  # while four run
    while engine._loop.busy:
        engine.step()
    assert engine.stats.occupancy == 1 and engine.stats.kv_cache_usage == 1
    engine.release()
    engine._session.settings = replace(engine._session.settings, memory=4 * PAGE)
    engine.generate([[5, 6]], GREEDY)
    assert engine.stats.kv_cache_usage == 1


def test_a_token_nobody_wants_any_more_is_not_counted(world, expected):
    """With a step in flight an end is noticed late: the token after it is dropped here too."""
    w = world(64, 16, max_num_seqs=1, max_num_batched_tokens=64, lookahead=1)
    first = Request(0, np.arange(9), 30, SamplingParams(temperature=0))
    first.stop_token_ids = frozenset(expected(first)[2:3])
    second = Request(1, np.arange(9) + 1, 13, SamplingParams(temperature=0))
    for request in (first, second):
        w.stats.record_queued(request, 0.0)
        w.scheduler.add(request)
    arrival_times = []
    while w.loop.busy:
        w.step()
        new = len(second.output_token_ids) - len(arrival_times)
        arrival_times += [w.time] * new
    num_tokens = len(first.output_token_ids) + len(second.output_token_ids)
    assert first.finish_reason == "stop" and w.stats.new_tokens == num_tokens
    assert w.stats._ttft.rows()[1] == arrival_times[0]
    assert w.stats._itl.rows().tolist() == [1.0] * (num_tokens - 2)


def test_a_reset_while_requests_run_starts_the_counts_anew(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=3)
    long = GREEDY | {"max_tokens": 12}
    prompts = [[5, 6, 7], [8, 9], [3, 4]]
    want = [c.token_ids for c in engine.generate(prompts, long)]
    brief = engine.add_request([10, 11], GREEDY | {"max_tokens": 1})
    # One of them waits for the brief one.
    numbers = [engine.add_request(prompt, long) for prompt in prompts]
    done = {e.request_id: e.completion for e in engine.step() if e.completion}
    assert list(done) == [brief]
    engine.stats.reset()
    while len(done) < 4:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
    assert [done[n].token_ids for n in numbers] == want
    assert engine.stats.new_tokens == 3 * 12 - 2
    assert len(engine.stats._ttft.rows()) == 1 and engine.stats.summary()["queue_time_p50"] > 0


def test_a_ring_buffer_holds_the_newest_rows_in_order():
    buffer = RingBuffer(2, limit=5)
    rows = np.arange(34.0).reshape(17, 2)
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, 9), (9, 17)):
        buffer.add(rows[start:stop])
        assert buffer.rows().tolist() == rows[max(0, stop - 5) : stop].tolist()
        assert len(buffer) == min(stop, 5)


def test_figures_of_a_reset_start_at_zero_and_idle_time_does_not_count(tiny):
    engine = Engine(tiny("llama"), page_size=16, memory=4 * 16 * 2 * 2 * 2 * 8 * 4)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.generate([[5 + i] * 14 for i in range(4)], long)
    seconds, preemptions = engine.stats.step_seconds, engine.stats.preemptions
    assert preemptions > 0
    engine.stats.reset()
    engine.generate([[5] * 4], long)
    assert engine.stats.preemptions == 0 and engine.stats.new_tokens == 30
    assert 0 < engine.stats.step_seconds < seconds


@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_step_counts_whole_and_nothing_between_them(world, lookahead, monkeypatch):
    w = world(16, 16, lookahead=lookahead)
    launch, waits = w.runner.launch, []

    def slow(step):
        w.time += 2
        read = launch(step)

        def reading():
            waits.append(4)
            w.time += 4
            return read()

        return reading

    monkeypatch.setattr(w.runner, "launch", slow)
    params = SamplingParams(temperature=0, max_tokens=5)
    w.scheduler.add(Request(id=0, prompt_token_ids=np.arange(3), max_len=8, params=params))
    w.drain(max_steps=20)
    assert len(waits) == 5 and w.stats.step_seconds == 5 * (2 + 4)
