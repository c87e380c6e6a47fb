"""Random schedules against the oracle: every request gets its tokens as if alone (B3, B5, B7)."""

from __future__ import annotations

import os

import numpy as np
import pytest
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams
from nopad.inference.scheduling import loop
from nopad.inference.scheduling import step as steps
from nopad.inference.scheduling.cache_checker import check_scheduler
from random_schedules import run_schedule

SCHEDULES = int(os.environ.get("NOPAD_SCHEDULES", "300"))


def test_every_request_gets_the_tokens_it_would_get_alone(world, expected):
    for seed in range(SCHEDULES):
        run_schedule(world, expected, seed)


def test_requests_in_order_of_length_get_the_same_tokens(world, expected, monkeypatch):
    monkeypatch.setattr(steps, "MAX_UNSORTED_SEQS", 1)
    build_step, lengths = loop.build_step, []

    def build(*args):
        built = build_step(*args)
        lengths.append([r.num_computed for r in built.requests])
        return built

    monkeypatch.setattr(loop, "build_step", build)
    for seed in range(SCHEDULES // 5):
        run_schedule(world, expected, 4 * 10**9 + seed, tight=seed % 2 == 1)
    assert all(row == sorted(row, reverse=True) for row in lengths)
    assert any(row != row[::-1] for row in lengths)


def test_a_cache_just_large_enough_for_one_request_serves_all(world, expected):
    for seed in range(SCHEDULES // 5):
        run_schedule(world, expected, 10**9 + seed, tight=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_ten_thousand_schedules_in_the_smallest_cache(world, expected):
    for seed in range(10**4):
        run_schedule(world, expected, 3 * 10**9 + seed, tight=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_million_schedules(world, expected):
    first, last = os.environ.get("NOPAD_SEEDS", f"0:{10**6}").split(":")  # a part, for a core
    for seed in range(int(first), int(last)):
        run_schedule(world, expected, 2 * 10**9 + seed, tight=seed % 3 == 0)


def simple(number: int, prompt: int, new: int, **more) -> Request:
    ids = np.arange(prompt) * 7 % 50 + number % 3
    params = SamplingParams(temperature=0, max_tokens=new)
    return Request(number, ids % 50, prompt + new, params, **more)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_may_be_cancelled_at_any_step(world, expected, lookahead):
    def play(cancel_at: int | None) -> list[list[int]]:
        w = world(7, 16, max_num_seqs=3, max_num_batched_tokens=12, lookahead=lookahead)
        requests = [simple(i, 20 + i, 10) for i in range(4)]
        for r in requests:
            w.scheduler.add(r)
        for step in range(200):
            if step == cancel_at and requests[1].finish_reason is None:
                held = w.scheduler.pages.available
                running = requests[1].row >= 0
                w.loop.abort(requests[1])
                assert w.scheduler.pages.available > held or not running
                check_scheduler(w.scheduler)
            w.step()
            if not w.loop.busy:
                break
        assert w.scheduler.pages.available == 7
        return [r.output_token_ids for r in requests]

    untouched = play(None)
    for step in range(40):
        others = play(step)
        assert [others[i] for i in (0, 2, 3)] == [untouched[i] for i in (0, 2, 3)]
        assert others[1] == untouched[1][: len(others[1])]


def test_a_shared_prefix_is_computed_once_even_when_all_arrive_together(world):
    w = world(64, 64, max_num_seqs=32, max_num_batched_tokens=1024)
    prefix = list(range(40))
    for i in range(8):
        prompt = np.array([*prefix, i, i + 1, i + 2])
        w.scheduler.add(Request(i, prompt, 45, SamplingParams(temperature=0, max_tokens=2)))
    w.drain(20)
    # 43 for the first; the others find 32 of 43 tokens; each then decodes one more.
    assert w.runner.num_computed_tokens == 43 + 7 * 11 + 8
    assert w.scheduler.num_prefix_hit_tokens == 7 * 32


def test_a_long_prefix_computed_in_chunks_is_still_computed_once(world):
    w = world(64, 16, max_num_seqs=32, max_num_batched_tokens=20)
    for i in range(4):
        prompt = np.array([*range(48), 40 + i])
        w.scheduler.add(Request(i, prompt, 50, SamplingParams(temperature=0, max_tokens=1)))
    w.drain(40)
    assert w.runner.num_computed_tokens == 49 + 3


def test_a_step_costs_the_same_whether_a_hundred_or_ten_thousand_wait(world, monkeypatch):
    from nopad.inference.scheduling import scheduler as module

    looked = []
    real = module.Scheduler._try_admit
    monkeypatch.setattr(
        module.Scheduler, "_try_admit", lambda self, *a: looked.append(1) or real(self, *a)
    )
    counts = []
    for waiting in (100, 10_000):
        w = world(8, 16, max_num_seqs=2, max_num_batched_tokens=16)
        for i in range(waiting):
            w.scheduler.add(simple(i, 5, 5))
        looked.clear()
        for _ in range(30):
            w.step()
        counts.append(len(looked))
    assert counts[0] == counts[1]


def test_higher_priority_runs_first_and_is_not_preempted(world, expected):
    w = world(4, 16, max_num_seqs=4, max_num_batched_tokens=64)
    low = [simple(i, 10, 30, priority=5) for i in range(3)]
    for r in low:
        w.scheduler.add(r)
    for _ in range(3):
        w.step()
    high = simple(9, 10, 40, priority=0)
    w.scheduler.add(high)
    w.drain(400)
    assert high.num_preemptions == 0 and sum(r.num_preemptions for r in low) > 0
    assert all(r.output_token_ids == expected(r) for r in [*low, high])


def test_a_deadline_returns_what_there_is(world, expected):
    w = world(16, 16, max_num_seqs=1, max_num_batched_tokens=64)
    first, second = simple(0, 5, 40, deadline=10.0), simple(1, 5, 40, deadline=5.0)
    w.scheduler.add(first)
    w.scheduler.add(second)
    w.drain(100)
    assert first.finish_reason == second.finish_reason == "deadline"
    assert (
        0 < len(first.output_token_ids) < 40
        and first.output_token_ids == expected(first)[: len(first.output_token_ids)]
    )
    assert second.output_token_ids == []


def test_limits_may_change_while_requests_run(world, expected):
    w = world(64, 16, max_num_seqs=8, max_num_batched_tokens=64)
    requests = [simple(i, 10 + i, 12) for i in range(12)]
    for r in requests:
        w.scheduler.add(r)
    for running, tokens in [(8, 64), (2, 3), (1, 1), (8, 40)] * 3:
        w.scheduler.max_num_seqs, w.scheduler.max_num_batched_tokens = running, tokens
        w.step()
    w.drain(500)
    assert all(r.output_token_ids == expected(r) for r in requests)


def test_a_waiting_request_joins_at_the_next_step(world):
    w = world(200, 16, max_num_seqs=4, max_num_batched_tokens=512)
    for i in range(12):
        w.scheduler.add(simple(i, 10, 4 + 3 * i))
    while w.scheduler.num_waiting:
        w.step()
        assert len(w.scheduler.running) >= min(3, w.scheduler.num_waiting)


def test_a_low_priority_waits_long_but_not_for_ever(world):
    w = world(200, 16, max_num_seqs=1, max_num_batched_tokens=64)
    low = simple(0, 4, 2)
    low.priority = 1
    w.scheduler.add(low)
    others = [simple(i, 4, 2) for i in range(1, 1200)]
    for request in others:
        w.scheduler.add(request)
    while low.finish_reason is None:
        w.step()
    overtaken = sum(request.finish_reason is not None for request in others)
    assert overtaken == 1023  # of those that came later; the others wait for it


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_that_does_not_fit_is_made_smaller_and_nothing_is_lost(world, expected, lookahead):
    from nopad.inference.scheduling.loop import OutOfMemory

    w = world(64, 16, max_num_seqs=8, max_num_batched_tokens=512, lookahead=lookahead)
    real, fits = w.runner.launch, 3

    def launch(step):
        if len(step.token_ids) > 40 or len(step.requests) > fits:
            raise OutOfMemory("seeded")
        return real(step)

    w.runner.launch = launch
    requests = [simple(i, 30 + i, 12) for i in range(8)]
    for r in requests:
        w.scheduler.add(r)
    w.drain(600)
    assert all(r.output_token_ids == expected(r) for r in requests)
    assert w.scheduler.max_num_seqs <= 8 and w.scheduler.max_num_batched_tokens <= 64
    fits = 0
    w.scheduler.add(simple(9, 5, 5))
    with pytest.raises(MemoryError, match="does not fit"):
        w.drain(100)
