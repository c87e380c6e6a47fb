"""Requests of known length are held back so that steps have equally many, and no step is added."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nopad.inference import Engine
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams
from nopad.inference.scheduling import even_steps
from nopad.inference.scheduling.even_steps import (
    MIN_RUNNING,
    STEPS_PER_TURN,
    EvenSteps,
    requests_to_hold,
)
from random_schedules import run_schedule


def decoding(number: int, tokens_left: int, **more) -> Request:
    """A request whose prompt is computed."""
    prompt, params = np.arange(5), SamplingParams(temperature=0, max_tokens=tokens_left)
    request = Request(number, prompt, 5 + tokens_left, params, **more)
    request.num_computed, request.row = 4, number
    return request


def run_all(requests: list[Request]) -> list[int]:
    """Run steps until nothing is left; return how many requests each had."""
    sizes, even_steps = [], EvenSteps(num_pages=10**6, page_size=16)
    while left := [r for r in requests if r.num_tokens < r.max_len]:
        held = even_steps.held(left, [])
        assert len(left) - len(held) >= min(len(left), MIN_RUNNING)
        sizes.append(len(left) - len(held))
        for r in left:
            if r not in held:
                r.num_tokens, r.num_computed = r.num_tokens + 1, r.num_computed + 1
    return sizes


def lengths(kind: str, rng: random.Random) -> list[int]:
    count = rng.randrange(MIN_RUNNING, 4 * MIN_RUNNING)
    return {
        "skewed": [min(int(rng.lognormvariate(5, 1)) + 1, 1024) for _ in range(count)],
        "uniform": [rng.randint(100, 1024) for _ in range(count)],
        "one long": [1000] + [rng.randint(1, 20) for _ in range(count)],
        "two kinds": [rng.choice([50, 500]) for _ in range(count)],
    }[kind]


@pytest.mark.parametrize("kind", ["skewed", "uniform", "one long", "two kinds"])
@pytest.mark.parametrize("seed", range(3))
def test_all_end_with_the_longest_and_large_steps_are_gone(kind, seed):
    new = lengths(kind, random.Random(seed))
    sizes = run_all([decoding(i, n) for i, n in enumerate(new)])
    assert sum(sizes) == sum(new)
    assert max(new) <= len(sizes) <= max(new) + STEPS_PER_TURN
    fewest = max(MIN_RUNNING, -(-sum(new) // max(new)))
    assert max(sizes) <= min(len(new), fewest + 2 * even_steps.ROW_STEP)


def test_equal_lengths_run_together():
    sizes = run_all([decoding(i, 64) for i in range(512)])
    assert sizes == [512] * 64


def test_few_requests_run_together():
    assert set(run_all([decoding(i, 10 * i + 1) for i in range(MIN_RUNNING)])) == {*range(1, 129)}


def test_nobody_is_held_back_where_that_could_take_pages_from_others():
    running = [decoding(i, n) for i, n in enumerate([1000] + [10] * 299)]
    needed = -(-1004 // 16) + 299  # pages of 16 tokens
    assert EvenSteps(needed, 16).held(running, [])
    assert not EvenSteps(needed - 1, 16).held(running, [])
    assert not EvenSteps(needed, 16).held(running[:-1], [(0, decoding(299, 12)), (0, running[-1])])


@pytest.mark.parametrize(
    "more",
    [{"stop_token_ids": frozenset({2})}, {"deadline": 9.0}, {"needs_host_check": True},
     {"priority": 1}, {"score_from": 1}],
)  # fmt: skip
def test_one_request_that_may_end_early_or_is_waited_for_holds_nobody_back(more):
    new = lengths("skewed", random.Random(0))
    requests = [decoding(i, n) for i, n in enumerate(new)]
    assert requests_to_hold(requests)
    assert not requests_to_hold([*requests, decoding(len(new), 50, **more)])


def test_prompts_are_not_held_back_and_count():
    requests = [decoding(i, n) for i, n in enumerate([1000] + [10] * 299)]
    requests[-1].num_computed = 0
    held = requests_to_hold(requests)
    assert len(held) == 299 - MIN_RUNNING and requests[-1] not in held


def test_waiting_requests_need_rows_too():
    running = [decoding(i, n) for i, n in enumerate([100] + [10] * 299)]
    waiting = [decoding(i, 60) for i in range(300, 600)]
    for request in waiting:
        request.num_computed, request.row = 0, -1
    assert len(requests_to_hold(running)) == 300 - MIN_RUNNING
    assert len(requests_to_hold(running + waiting)) == 300 - 256  # 211 and a bit, padded
    assert not requests_to_hold(running + waiting * 2)
    assert EvenSteps(10**6, 16).held(running, [(0, waiting[0])] * 9)
    assert not EvenSteps(10**6, 16).held(running, [(0, waiting[0])] * 1025)
    waiting[7].length_is_known = False
    assert not requests_to_hold(running + waiting)


def test_held_requests_get_the_tokens_they_would_get_alone(world, expected, monkeypatch):
    for name in ("MIN_RUNNING", "ROW_STEP", "STEPS_PER_TURN"):
        monkeypatch.setattr(even_steps, name, 1)
    num_held = 0

    def count_held(*args):
        nonlocal num_held
        held = requests_to_hold(*args)
        num_held += len(held)
        return held

    monkeypatch.setattr(even_steps, "requests_to_hold", count_held)
    for seed in range(400):
        tight = seed % 4 == 0
        run_schedule(world, expected, 5 * 10**9 + seed, tight=tight, known_lengths=True)
    assert num_held > 100


def test_requests_are_not_held_back_where_each_token_has_a_time(world):
    w = world(400, 16, max_num_seqs=300, max_num_batched_tokens=4096)
    requests = [decoding(i, n) for i, n in enumerate([20] * 40 + [3] * 260)]
    for request in requests:
        request.num_computed = 0
        w.scheduler.add(request)
    w.step()
    assert len(w.scheduler.plan().requests) == MIN_RUNNING
    assert len(w.scheduler.plan(may_hold=False).requests) == 300


def test_an_engine_gives_the_same_tokens_in_even_steps(tiny):
    rng = random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 9))] for _ in range(200)]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.choice([2, 3, 40]), ignore_eos=True)
        for _ in prompts
    ]
    engine = Engine(tiny("llama"), max_num_seqs=256, page_size=16)

    def generate(**more) -> tuple[list[list[int]], int]:
        engine.stats.reset()
        completions = engine.generate(prompts, params, **more)
        _, running, _, num_tokens, *_ = engine.stats.steps_log.T
        return [c.token_ids for c in completions], int(running[running == num_tokens].max())

    (even, even_rows), (all_at_once, all_rows) = generate(), generate(deadline=3600.0)
    assert even == all_at_once
    assert even_rows == MIN_RUNNING < all_rows
