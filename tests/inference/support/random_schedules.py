"""Random schedules: requests, cache sizes, arrivals, aborts; all get their tokens as if alone."""

from __future__ import annotations

import random

import numpy as np
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams


def random_request(
    rng: random.Random, number: int, prefixes: list[list[int]], known_length: bool
) -> Request:
    prefix = rng.choice(prefixes)[: rng.choice([0, 0, 16, 20, 33, 48])]
    prompt = prefix + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.2:
        prompt = prefixes[0][: rng.choice([16, 32, 48])]  # whole strides, the same for several
    params = SamplingParams(temperature=rng.choice([0, 1]), max_tokens=rng.randint(1, 10))
    return Request(
        id=number,
        prompt_token_ids=np.array(prompt),
        max_len=len(prompt) + params.max_tokens,
        params=params,
        seed=rng.randrange(2**60),
        priority=0 if known_length else rng.choice([0, 0, 0, 1, -1]),
        stop_token_ids=frozenset(
            rng.sample(range(50), 0 if known_length else rng.choice([0, 1, 5]))
        ),
    )


def run_schedule(
    world, expected, seed: int, *, tight: bool = False, known_lengths: bool = False
) -> None:
    """Run one random schedule and check the tokens of every request.

    tight: pages for one request only; known_lengths: nothing ends a request early.
    """
    rng = random.Random(seed)
    page_size = rng.choice([16, 32, 48, 64])
    prefixes = [[rng.randrange(50) for _ in range(48)] for _ in range(2)]
    count = rng.choice([*range(1, 7), *range(1, 7), 12])
    requests = [random_request(rng, i, prefixes, known_lengths) for i in range(count)]
    min_pages = max(-(-(r.max_len - 1) // page_size) for r in requests)
    num_pages = min_pages if tight else min_pages + rng.choice([0, 0, 0, 1, 8])
    if known_lengths and not tight:  # pages for all, so that requests may pause
        num_pages = sum(-(-(r.max_len - 1) // page_size) for r in requests)
    max_num_seqs = rng.choice([1, 2, 3, 4, 5, 8])
    w = world(
        num_pages,
        page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([2, 5, 8, 17, 64, 64]),
        lookahead=rng.choice([0, 1]),
        max_scored_positions=rng.choice([1, 100]),
        check=seed % 3 == 0,
    )
    arrivals = sorted((rng.choice([0, 0, rng.randrange(30)]), r.id) for r in requests)
    aborts = {rng.randrange(40): r.id for r in requests if rng.random() < 0.15}
    num_output: dict[int, int] = {}
    # Alone, at most one step per token; preempted by older requests, once more for each.
    max_steps = 40 + sum(r.max_len for r in requests) * (len(requests) + 1)
    for step in range(max_steps):
        while arrivals and arrivals[0][0] <= step:
            w.scheduler.add(requests[arrivals.pop(0)[1]])
        if step in aborts:
            request = requests[aborts[step]]
            if request.arrival and request.finish_reason is None:
                w.loop.abort(request)
                num_output[request.id] = len(request.output_token_ids)
        w.step()
        if not arrivals and not w.loop.busy:
            break
    for r in requests:
        want, got = expected(r), r.output_token_ids
        if r.id in num_output:
            assert r.finish_reason == "abort" and got == want[: num_output[r.id]]
        else:
            assert got == want, f"seed {seed}, request {r.id}: {got} is not {want}"
            reason = "stop" if want[-1] in r.stop_token_ids else "length"
            assert r.finish_reason == reason, f"seed {seed}, request {r.id}: {r.finish_reason}"
    assert w.scheduler.pages.available == num_pages, f"seed {seed}: pages were not given back"
