"""The engine's figures: what they count is what happened, whatever is done meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from nopad.inference import Engine, SamplingParams
from nopad.inference.requests.request import Request

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
PAGE = 16 * 2 * 2 * 2 * 8 * 4


def test_a_turned_dial_leaves_the_steps_before_it_as_they_were(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=4)
    engine.generate([[5, 6, i] for i in range(7, 10)], GREEDY)
    assert engine.stats.occupancy == 3 / 4
    engine.max_num_seqs = 1
    engine.generate([[5, 6, i] for i in range(7, 10)], GREEDY)
    assert engine.stats.occupancy == (5 * 3 / 4 + 15) / 20


def test_no_more_than_all_slots_and_pages_are_ever_in_use(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=4, memory=8 * PAGE)
    for i in range(4):
        engine.add_request([5, 6, i] * 9, GREEDY)
    engine.step()
    engine.max_num_seqs = 1  # while four run
    while engine._loop.busy:
        engine.step()
    assert engine.stats.occupancy == 1 and engine.stats.kv_cache_usage == 1
    engine.release()
    engine._tenancy.settings = replace(engine._tenancy.settings, memory=4 * PAGE)
    engine.generate([[5, 6]], GREEDY)
    assert engine.stats.kv_cache_usage == 1


def test_a_token_nobody_wants_any_more_is_not_counted(world, expected):
    """With a step under way an end is noticed late: the token after it is dropped, here as well."""
    w = world(64, 16, max_num_seqs=1, max_num_batched_tokens=64, depth=1)
    admit = w.scheduler._on_admit
    w.scheduler._on_admit = lambda r: (admit(r), w.stats.note_admitted(r, w.time))
    first = Request(0, np.arange(9), 30, SamplingParams(temperature=0))
    first.stop_ids = frozenset(expected(first)[2:3])
    second = Request(1, np.arange(9) + 1, 13, SamplingParams(temperature=0))
    for request in (first, second):
        w.stats.note_queued(request, 0.0)
        w.scheduler.add(request)
    came = []
    while w.loop.busy:
        w.step()
        came += [w.time] * (len(second.output) - len(came))
    made = len(first.output) + len(second.output)
    assert first.finish_reason == "stop" and w.stats.new_tokens == made
    assert w.stats._ttft.rows()[1] == came[0]
    assert w.stats._itl.rows().tolist() == [1.0] * (made - 2)


def test_a_reset_while_requests_run_starts_the_counts_anew_and_harms_nobody(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=3)
    long = GREEDY | {"max_tokens": 12}
    prompts = [[5, 6, 7], [8, 9], [3, 4]]
    want = [c.token_ids for c in engine.generate(prompts, long)]
    brief = engine.add_request([10, 11], GREEDY | {"max_tokens": 1})
    numbers = [
        engine.add_request(prompt, long) for prompt in prompts
    ]  # one waits for the brief one
    done = {e.request_id: e.completion for e in engine.step() if e.completion}
    assert list(done) == [brief]
    engine.stats.reset()
    while len(done) < 4:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
    assert [done[n].token_ids for n in numbers] == want
    assert engine.stats.new_tokens == 3 * 12 - 2
    assert len(engine.stats._ttft.rows()) == 1 and engine.stats.summary()["queue_time_p50"] > 0
