"""Unseeded draws: fresh in every call, the same when a run is repeated, whatever else happens."""

from __future__ import annotations

import pytest
from nopad.inference import DataParallelEngine, Engine
from nopad.runtime import draw_counts, draw_stream, load_draw_counts, number_call
from nopad.trainer.evaluation import Example, GenerationEval

HOT = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = [[3, 4], [5, 6], [3, 4]]


pytestmark = pytest.mark.usefixtures("no_draws_yet")


def drawn(generate, prompts=PROMPTS, **more) -> list[list[int]]:
    return [completion.token_ids for completion in generate(prompts, HOT | more)]


def evaluation(engine, name=""):
    return GenerationEval(engine.generate, [Example([3, 4])], {}, HOT, name=name)


def test_every_call_draws_fresh_numbers_also_in_a_new_engine(tiny):
    engine = Engine(tiny("llama"))
    texts = [text for _ in range(5) for text in drawn(engine.generate)]
    texts += drawn(Engine(tiny("llama")).generate)
    streamed: dict[int, list[int]] = {}
    for event in engine.stream(PROMPTS, HOT):
        streamed.setdefault(event.request_id, []).extend(event.token_ids)
    texts += streamed.values()
    texts += drawn(engine.generate, n=2)
    assert len({tuple(text) for text in texts}) == len(texts) == 24


def test_a_repeated_run_draws_the_same_and_another_seed_does_not(tiny):
    def run(seed: int) -> list:
        load_draw_counts({})
        engine = Engine(tiny("llama"), seed=seed)
        return [drawn(engine.generate), drawn(engine.generate, n=2), drawn(engine.generate)]

    assert run(0) == run(0) != run(1)


def test_a_seed_fixes_a_request_wherever_it_is(tiny):
    engine = Engine(tiny("llama"))
    alone = drawn(engine.generate, [[5, 6]], seed=7)
    assert drawn(engine.generate, seed=7)[1] == alone[0]
    assert drawn(Engine(tiny("llama"), seed=3).generate, [[5, 6]], seed=7) == alone


def test_an_evaluation_changes_nothing_later(tiny):
    engine = Engine(tiny("llama"))
    without = [drawn(engine.generate) for _ in range(2)]
    load_draw_counts({})
    one, two = evaluation(engine, "one"), evaluation(engine, "two")
    rows = [one.run(0).rows[0].completion]
    between = [drawn(engine.generate)]
    two.run(0)
    rows += [one.run(1).rows[0].completion]
    between += [drawn(engine.generate)]
    assert between == without
    load_draw_counts({})
    assert [one.run(0).rows[0].completion, one.run(1).rows[0].completion] == rows
    assert draw_counts() == {"eval/one/": 2}


def test_the_counters_continue_where_a_checkpoint_was(tiny):
    engine = Engine(tiny("llama"))
    drawn(engine.generate)
    saved = draw_counts()
    rest = [drawn(engine.generate) for _ in range(2)]
    load_draw_counts(saved)
    assert [drawn(Engine(tiny("llama")).generate) for _ in range(2)] == rest


def test_ranks_that_call_for_themselves_differ_and_those_of_a_group_do_not(tiny, monkeypatch):
    model = tiny("llama")

    def on_ranks(*ranks: int) -> list:
        load_draw_counts({})
        monkeypatch.setattr("nopad.inference.requests.draws.replica_ranks", lambda _: ranks)
        return drawn(Engine(model).generate)

    assert on_ranks(0) != on_ranks(1) != on_ranks(2)
    assert on_ranks(0, 1) == on_ranks(0) != on_ranks(2, 3) == on_ranks(2)


def test_prompts_distributed_over_ranks_draw_what_one_rank_draws(tiny, monkeypatch):
    ranks = DataParallelEngine(Engine(tiny("llama")))
    want = drawn(ranks.generate)
    for rank in range(2):
        load_draw_counts({})
        monkeypatch.setattr("nopad.inference.requests.draws.replica_ranks", lambda _, r=rank: [r])
        monkeypatch.setattr(
            "nopad.inference.data_parallel.run_on_all_ranks",
            lambda work, shards: [work([2]), work([0, 1])],
        )
        (last,), first = ranks.generate(PROMPTS, HOT)
        assert [c.token_ids for c in [*first, last]] == want


def test_the_outermost_stream_counts():
    with draw_stream("eval/x"), draw_stream("harness"):
        assert number_call() == ("eval/x", 0)
