"""Drafts change how many tokens a step yields, never which: speculate ≡ not (B26)."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from nopad.inference.metrics.stats import Stats
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams
from nopad.inference.scheduling import speculation
from nopad.inference.scheduling.loop import OutOfMemory
from nopad.inference.scheduling.speculation import DraftText, Speculation, StepTimes
from oracle import World, tokens_alone
from random_schedules import run_schedule


class GuessedDrafts(Speculation):
    """Drafts of the right tokens, some replaced by others."""

    def __init__(self, stats: Stats, wrong: float):
        super().__init__("history", stats)
        self._wrong, self._rng = wrong, random.Random(0)

    def _open(self, request: Request) -> DraftText:
        right = tokens_alone(request)
        draft = [self._rng.randrange(50) if self._rng.random() < self._wrong else t for t in right]
        return DraftText(request, np.array(draft, np.int32))


class SpeculatingWorld(World):
    """A world whose requests have drafts; steps take the time of `cost`, by tokens.

    overhead: time of a switch between steps with drafts and without, and of a look at ten requests.
    """

    def __init__(self, *args, wrong=0.3, cost=None, overhead=0.0, speculate=True, **options):
        super().__init__(*args, **options)
        if speculate:
            self.loop.speculation = GuessedDrafts(self.stats, wrong)
            follow = self.loop.speculation._follow

            def timed_follow(decoding):
                self.time += overhead * len(decoding) / 10
                return follow(decoding)

            self.loop.speculation._follow = timed_follow
        if cost is not None:
            launch, had_drafts = self.runner.launch, False

            def timed(step):
                nonlocal had_drafts
                has_drafts = any(request.draft for request in step.requests)
                self.time += cost(len(step.token_ids)) - 1  # `step` adds 1
                self.time += overhead * (has_drafts != had_drafts)
                had_drafts = has_drafts
                return launch(step)

            self.runner.launch = timed


@pytest.fixture
def always(monkeypatch):
    """Steps with drafts take no longer than those without, as far as the decision knows."""
    monkeypatch.setattr(speculation.StepTimes, "plain", lambda self, count: 1.0)
    sizes = [(16, 1.0), (64, 1.0)]
    monkeypatch.setattr(speculation.StepTimes, "drafted", lambda self, *_: sizes)


def requests_for(world, count: int, new: int, **more) -> list[Request]:
    params = SamplingParams(temperature=1, max_tokens=new)
    made = [
        Request(i, np.arange(5 + i % 7) * 7 % 50, 5 + i % 7 + new, params, seed=i, **more)
        for i in range(count)
    ]
    for request in made:
        world.scheduler.add(request)
    return made


@pytest.mark.parametrize("tight", [False, True])
def test_every_request_gets_the_tokens_it_would_get_alone(always, expected, tight):
    worlds = []

    def world(*args, **options) -> World:
        worlds.append(SpeculatingWorld(*args, wrong=len(worlds) % 4 / 4, **options))
        return worlds[-1]

    for seed in range(150):
        run_schedule(world, expected, 5 * 10**9 + seed, tight=tight)
    drafted, accepted = (
        sum(getattr(w.stats, name) for w in worlds)
        for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted
    assert tight == any(w.scheduler.num_preemptions for w in worlds) or not tight


@pytest.mark.parametrize("lookahead", [0, 1])
def test_right_drafts_save_steps_and_are_counted(always, expected, lookahead):
    w = SpeculatingWorld(64, 16, lookahead=lookahead, wrong=0)
    (request,) = requests_for(w, 1, 40)
    steps = w.drain(100)
    assert request.output_token_ids == expected(request)
    assert steps <= 5 and w.stats.acceptance_rate == 1
    assert w.stats.new_tokens == 40 and w.stats.accepted_tokens == w.stats.drafted_tokens >= 36


def test_a_draft_takes_no_page_from_another_request(always, expected):
    w = SpeculatingWorld(6, 16, max_num_seqs=3, wrong=0)
    made = requests_for(w, 3, 26)  # two pages each
    w.drain(60)
    assert [r.num_preemptions for r in made] == [0, 0, 0]
    assert [r.output_token_ids for r in made] == [expected(r) for r in made]


def test_a_request_that_is_recomputed_token_by_token_has_no_draft(always, expected):
    """After a preemption, with one scored position per step, it has output but no new token."""
    w = SpeculatingWorld(64, 16, max_scored_positions=1, wrong=0)
    (request,) = requests_for(w, 1, 40, score_from=1)
    while len(request.output_token_ids) < 9:
        w.step()
    w.scheduler.preempt_all("seeded")
    w.drain(100)
    assert request.output_token_ids == expected(request)


def test_a_draft_that_does_not_fit_into_memory_is_dropped_and_the_batch_kept(always, expected):
    w = SpeculatingWorld(64, 16, wrong=0)
    launch = w.runner.launch

    def limited(step):
        if len(step.sampled_rows) > 20:
            raise OutOfMemory("seeded")
        return launch(step)

    w.runner.launch = limited
    made = requests_for(w, 4, 40)
    limits = w.scheduler.max_num_seqs, w.scheduler.max_num_batched_tokens
    w.drain(200)
    assert [r.output_token_ids for r in made] == [expected(r) for r in made]
    assert limits == (w.scheduler.max_num_seqs, w.scheduler.max_num_batched_tokens)
    assert w.stats.accepted_tokens > 0


COSTS = {
    "free rows": lambda tokens: 1.0,
    "a base": lambda tokens: 1 + tokens / 64,
    "rows only": lambda tokens: tokens / 8,
}


@pytest.mark.parametrize(
    "sizes", [(12, 100), (1, 300), pytest.param((24, 200), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("overhead", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_used_only_where_it_pays(cost, overhead, wrong, sizes, expected):
    """The same requests take at most 1 / 0.98 of the time they take without; less where it pays.

    Besides, a first trial has its price: a few switches and steps of 16 rows.
    """
    times = []
    for speculate in (True, False):
        w = SpeculatingWorld(
            400, 16, max_num_seqs=8, max_num_batched_tokens=512, lookahead=1, overhead=overhead,
            check=False, wrong=wrong, cost=COSTS[cost], speculate=speculate,
        )  # fmt: skip
        made = requests_for(w, *sizes)
        w.drain(1000)
        assert [r.output_token_ids for r in made[:3]] == [expected(r) for r in made[:3]]
        times.append(w.time)
    assert times[0] <= times[1] / 0.98 + 5 * overhead + 3 * COSTS[cost](16)
    if wrong <= 0.3 and cost != "rows only" and overhead < 1:
        assert times[0] < times[1] / 1.4


@pytest.mark.parametrize("pause", [100.0, 3000.0])
def test_a_pause_or_captures_do_not_end_the_use_of_drafts(pause, expected):
    times = []
    for disturbed in (False, True):
        w = SpeculatingWorld(
            900, 16, max_num_seqs=8, max_num_batched_tokens=512, lookahead=1, check=False,
            wrong=0.0, cost=COSTS["free rows"],
        )  # fmt: skip
        requests_for(w, 24, 200)
        start = w.time
        for step in range(2000):
            if disturbed and step == 40:
                w.time, start = w.time + pause, start + pause
                w.stats.capture_seconds += pause
            if disturbed and step == 60:
                w.stats.capture_seconds = 0.0  # a reset
            if not w.loop.busy:
                break
            w.step()
        times.append(w.time - start)
    assert times[1] < 1.2 * times[0] + 10


def test_a_drafted_step_is_read_before_the_next_is_planned(always):
    w = SpeculatingWorld(64, 16, lookahead=1, wrong=0.5)
    made = requests_for(w, 3, 60)
    while w.loop.busy:
        w.step()
        in_flight = [step for step, *_ in w.loop._in_flight]
        assert all(step.max_query_len == 1 or w.stats.steps < 3 for step in in_flight)
        assert all(not r.draft for r in made)


def test_the_text_to_draft_from_follows_the_request():
    prompt = np.array([9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3])
    text = DraftText(Request(0, prompt, 40, SamplingParams()), None)
    assert text.draft(3) == [4, 5, 6]
    assert text.advance([4, 5]) == (2, 2) and text.draft(9)[:2] == [6, 8]
    assert text.advance([4, 5, 7]) == (0, 1) and text.draft(3) == []
    assert text.advance([4, 5, 7, 2, 3, 4]) == (0, 0) and text.draft(2) == [5, 7]  # the newest
    earlier = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    text = DraftText(Request(0, prompt, 40, SamplingParams()), earlier)
    assert text.advance([1, 2]) == (2, 2) and text.draft(2) == [3, 4]
    assert text.advance([1, 2, 9]) == (0, 1) and text.draft(2) == [4, 5]  # one replaced
    assert text.advance([1, 2, 9, 5, 6, 7]) == (0, 1) and text.draft(9) == [8]  # two omitted


def test_lengths_of_drafts_follow_the_chances(monkeypatch):
    """The likeliest tokens are drafted first, within the rows of a step."""
    monkeypatch.setattr(speculation.StepTimes, "plain", lambda self, count: 1.0)
    monkeypatch.setattr(speculation.StepTimes, "drafted", lambda self, *_: [(16, 1.0)])
    drafts = GuessedDrafts(Stats(), 0)
    made = [Request(i, np.arange(4), 200, SamplingParams(), seed=i) for i in range(3)]
    for number, request in enumerate(made):
        request.output_token_ids = tokens_alone(request)[:1]
        request.num_tokens = 5
        drafts._texts[request.id] = text = drafts._open(request)
        text.hits, text.checked = (1.0, 5.0, 9.0)[number], 10.0
    lengths = drafts._draft_lengths(made, 1024)
    assert sum(lengths) == 16 - 3 and all(a < b for a, b in pairwise(lengths))


def test_a_slow_step_with_few_drafts_does_not_rule_out_more():
    """A step with drafts waits for the host, whatever their number."""
    times, plain = StepTimes(), 0.9
    for end in range(5):
        times.record(8, 16, 2.2 * end)
    (_, known), (more, guess) = times.drafted(8, plain)
    assert known == pytest.approx(2.2) and more == 64
    assert 8 * (1 + sum(0.9**n for n in range(1, 8))) / guess > 8 / plain
