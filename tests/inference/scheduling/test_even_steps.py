"""Short requests of known length pause: steps have equally many requests, none is added."""

from __future__ import annotations

import random

import numpy as np
import pytest
from nopad.inference import Engine
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams
from nopad.inference.scheduling import even_steps
from nopad.inference.scheduling.even_steps import (
    MIN_REQUESTS,
    EvenSteps,
    requests_to_pause,
)
from random_schedules import run_schedule


def decoding(number: int, tokens_left: int, **more) -> Request:
    """A request whose first token is sampled."""
    prompt, params = np.arange(5), SamplingParams(temperature=0, max_tokens=tokens_left)
    request = Request(number, prompt, 6 + tokens_left, params, **more)
    request.num_computed, request.num_tokens, request.row = 5, 6, number
    return request


def run_all(requests: list[Request]) -> list[int]:
    """Run steps until nothing is left; return how many requests each had."""
    sizes, even_steps = [], EvenSteps(num_pages=10**6, page_size=16)
    while left := [r for r in requests if r.num_to_sample]:
        paused = even_steps.paused(left, [], 10**6)
        assert len(left) - len(paused) >= min(len(left), MIN_REQUESTS)
        sizes.append(len(left) - len(paused))
        for r in left:
            if r not in paused:
                r.num_tokens, r.num_computed = r.num_tokens + 1, r.num_computed + 1
    return sizes


def lengths(kind: str, rng: random.Random) -> list[int]:
    count = rng.randrange(2 * MIN_REQUESTS, 4 * MIN_REQUESTS)
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
    assert max(new) <= len(sizes) <= max(new) + 4
    fewest = max(MIN_REQUESTS, -(-sum(new) // max(new)))
    assert max(sizes) <= min(len(new), fewest + 2 * even_steps.ROW_STEP)


def test_equal_lengths_run_together():
    sizes = run_all([decoding(i, 64) for i in range(512)])
    assert sizes == [512] * 64
    # Admitted in turn, 27 in a step, as prompts of 60 tokens are.
    assert not requests_to_pause([decoding(i, 64 - i // 27) for i in range(512)])


def test_all_run_where_steps_would_be_large_anyway():
    assert requests_to_pause([decoding(i, 100 if i < 200 else 20) for i in range(480)])
    assert not requests_to_pause([decoding(i, 100 if i < 210 else 20) for i in range(480)])


def test_few_requests_run_together():
    sizes = run_all([decoding(i, 10 * i + 1) for i in range(MIN_REQUESTS)])
    assert set(sizes) == {*range(1, MIN_REQUESTS + 1)}


def test_none_pauses_where_that_could_take_pages_from_others():
    running = [decoding(i, n) for i, n in enumerate([1000] + [10] * 299)]
    needed = -(-1004 // 16) + 299  # pages of 16 tokens
    assert EvenSteps(needed, 16).paused(running, [], 512)
    assert not EvenSteps(needed - 1, 16).paused(running, [], 512)
    assert not EvenSteps(needed, 16).paused(running, [(0, decoding(300, 10))], 512)


@pytest.mark.parametrize(
    "more",
    [{"stop_token_ids": frozenset({2})}, {"deadline": 9.0}, {"needs_host_check": True},
     {"priority": 1}, {"score_from": 1}],
)  # fmt: skip
def test_none_pauses_beside_a_request_that_may_end_early_or_is_waited_for(more):
    requests = [decoding(i, n) for i, n in enumerate(lengths("skewed", random.Random(0)))]
    assert requests_to_pause(requests)
    assert not requests_to_pause([*requests, decoding(len(requests), 50, **more)])


def test_a_request_with_penalties_does_not_pause():
    params = SamplingParams(max_tokens=5, repetition_penalty=1.2)
    assert not Request(0, np.arange(5), 10, params).may_pause


def test_prompts_do_not_pause_and_count():
    requests = [decoding(i, n) for i, n in enumerate([1000] + [10] * 299)]
    requests[-1].num_computed, requests[-1].num_tokens = 4, 5  # its last token is to be computed
    paused = requests_to_pause(requests)
    assert len(paused) == 299 - MIN_REQUESTS and requests[-1] not in paused


def test_waiting_requests_count():
    running = [decoding(i, n) for i, n in enumerate([100] + [10] * 299)]
    waiting = [decoding(i, 60) for i in range(300, 600)]
    for request in waiting:
        request.num_computed, request.num_tokens, request.row = 0, 5, -1
    assert len(requests_to_pause(running)) == 300 - MIN_REQUESTS
    assert len(requests_to_pause(running + waiting)) == 300 - 256  # 211, rounded up
    waiting[7].may_pause = False
    assert not requests_to_pause(running + waiting)


def test_no_step_is_added_where_requests_wait_for_rows(world):
    def count_steps(target_itl: float | None) -> int:
        w = world(10**4, 16, max_num_seqs=512, max_num_batched_tokens=10**5)
        w.loop.target_itl = target_itl
        for i, n in enumerate([40] + [16] * 637):
            params = SamplingParams(temperature=0, max_tokens=n)
            w.scheduler.add(Request(i, np.arange(5), 5 + n, params))
        steps = 0
        while w.loop.busy:
            w.step()
            steps += 1
        return steps

    assert count_steps(None) == count_steps(1.0)


def test_paused_requests_get_the_tokens_they_would_get_alone(world, expected, monkeypatch):
    for name in ("MIN_REQUESTS", "ROW_STEP"):
        monkeypatch.setattr(even_steps, name, 1)
    num_paused = 0

    def count_paused(requests):
        nonlocal num_paused
        paused = requests_to_pause(requests)
        num_paused += len(paused)
        return paused

    monkeypatch.setattr(even_steps, "requests_to_pause", count_paused)
    for seed in range(200):
        monkeypatch.setattr(even_steps, "STEPS_PER_TURN", 1 + seed % 4)
        tight = seed % 5 == 0
        run_schedule(world, expected, 5 * 10**9 + seed, tight=tight, known_lengths=True)
    assert num_paused > 50


@pytest.mark.parametrize(("target_itl", "num_rows"), [(None, MIN_REQUESTS), (1.0, 300)])
def test_none_pauses_with_target_itl(world, target_itl, num_rows):
    w = world(10**3, 16, max_num_seqs=300, max_num_batched_tokens=4096)
    w.loop.target_itl = target_itl
    for i, n in enumerate([20] * 40 + [5] * 260):
        params = SamplingParams(temperature=0, max_tokens=n)
        w.scheduler.add(Request(i, np.arange(5), 5 + n, params))
    w.step()
    w.step()
    assert len(w.scheduler.plan(may_pause=target_itl is None).requests) == num_rows
    assert w.loop.stats.steps_log[-1][1] == num_rows


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
    assert even_rows == MIN_REQUESTS < all_rows
