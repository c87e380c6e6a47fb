"""Every request gets one completion: after faults, interrupts, releases and bad arguments."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from fake_tokenizer import FakeTokenizer
from nopad.inference import DataParallelEngine, Engine

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = [5, 6, 7]


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), page_size=16)


@pytest.fixture
def want(tiny):
    return Engine(tiny("llama"), page_size=16).generate([PROMPT], GREEDY)[0]


@contextmanager
def failing(engine, error):
    def fail(*_):
        raise error

    hook = engine._model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        hook.remove()


def finished(engine) -> dict:
    """Step until no request is active; return the completions."""
    done = {}
    for _ in range(60):
        for event in engine.step():
            if event.completion is not None:
                assert event.request_id not in done, "two completions of one request"
                done[event.request_id] = event.completion
    return done


FAULTS = [RuntimeError("boom"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", FAULTS, ids=["fault", "interrupt"])
def test_a_step_that_fails_ends_active_requests(engine, want, error):
    refused = engine.add_request([3, 97], GREEDY)
    waiting, several = (
        engine.add_request(PROMPT, GREEDY),
        engine.add_request([8, 9], GREEDY | {"n": 2}),
    )
    with failing(engine, error):
        engine.step()
    assert not engine._outputs.has_requests()
    done = finished(engine)
    assert list(done) == [refused, waiting, several]
    assert "97 is not in the vocabulary" in done[refused].error
    for number in (waiting, several):
        assert done[number].finish_reason == "error" and type(error).__name__ in done[number].error
    assert engine.stats.finished == {"error": 3} and engine.stats._queued_at == {}
    assert engine.generate([PROMPT], GREEDY) == [want]


@pytest.mark.parametrize("error", FAULTS, ids=["fault", "interrupt"])
def test_a_blocking_call_that_fails_leaves_streams_an_answer(engine, error):
    number = engine.add_request(PROMPT, GREEDY)
    events = engine.stream([PROMPT, [8, 9]], GREEDY)
    begun = next(events)
    with failing(engine, error):
        engine.generate([[3, 4]], GREEDY)
    done = finished(engine)
    assert list(done) == [number] and "stopped on an error" in done[number].error
    ended = {e.request_id: e.completion for e in events if e.completion}
    assert begun.completion is None and sorted(ended) == [0, 1]
    assert all("stopped on an error" in c.error for c in ended.values())


def test_a_release_ends_active_requests(engine, want):
    number = engine.add_request(PROMPT, GREEDY)
    events = engine.stream([PROMPT], GREEDY)
    next(events)
    engine.release()
    (ended,) = events
    assert "released" in ended.completion.error and ended.request_id == 0
    done = finished(engine)
    assert list(done) == [number] and "released" in done[number].error
    assert engine.generate([PROMPT], GREEDY) == [want]


def test_a_bad_deadline_is_told_and_harms_nobody(engine, want):
    number = engine.add_request(PROMPT, GREEDY)
    engine.step()
    for call in (
        engine.generate,
        DataParallelEngine(engine).generate,
        lambda *a, **k: list(engine.stream(*a, **k)),
    ):
        with pytest.raises(ValueError, match=r"^deadline is 'x'; pass seconds or None"):
            call([PROMPT], GREEDY, deadline="x")
        with pytest.raises(ValueError, match="2 deadline for 1 prompts"):
            call([PROMPT], GREEDY, deadline=[1.0, 2.0])
    for bad in ("x", float("nan")):
        with pytest.raises(ValueError, match=r"^deadline is .*; pass seconds or None"):
            engine.score([PROMPT], [[8]], deadline=bad)
        with pytest.raises(ValueError, match=r"^deadline is .*; pass seconds or None"):
            engine.add_request(PROMPT, GREEDY, deadline=bad)
    with pytest.raises(ValueError, match=r"^deadline is 'x'; pass seconds or None"):
        engine.generate([PROMPT] * 2, GREEDY, deadline=[1.0, "x"])
    assert finished(engine) == {number: want}


def test_every_request_may_have_a_deadline_of_its_own(engine, want):
    each = [None, 0, 1e9, -1.0]
    for generate in (engine.generate, DataParallelEngine(engine).generate):
        done = generate([PROMPT] * 4, GREEDY, deadline=each)
        assert done[0] == done[2] == want
        assert [c.finish_reason for c in done[1::2]] == ["deadline", "deadline"]
    ended = {e.request_id: e for e in engine.stream([PROMPT] * 2, GREEDY, deadline=[0, None])}
    assert [ended[i].completion.finish_reason for i in (0, 1)] == ["deadline", "length"]


def test_another_autocast_is_told_and_harms_nobody(engine, want):
    number = engine.add_request(PROMPT, GREEDY)
    events = engine.stream([PROMPT], GREEDY)
    next(events)
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            engine.step,
            lambda: engine.generate([PROMPT]),
            lambda: next(engine.stream([PROMPT])),
        ):
            with pytest.raises(ValueError, match="autocast"):
                call()
    assert [e.completion for e in events][-1] == want
    assert finished(engine) == {number: want}


def test_steps_without_requests_allow_a_change_of_autocast(engine, want):
    engine.generate([PROMPT], GREEDY)
    engine._loop._lookahead = 1  # as on a GPU: an end is noticed while the next step runs
    (done,) = engine.generate([PROMPT], GREEDY | {"stop_token_ids": want.token_ids[1:2]})
    assert done.finish_reason == "stop" and engine._loop.busy
    with torch.autocast("cpu", torch.bfloat16):
        assert engine.generate([PROMPT], GREEDY)[0].error is None


def test_the_samples_of_a_prompt_count_one_by_one_in_a_bounded_queue(tiny):
    engine = Engine(tiny("llama"), page_size=16, max_num_seqs=1, max_waiting=3)
    drawn = GREEDY | {"temperature": 1.0}
    fits, full = (engine.add_request(PROMPT, drawn | {"n": n}) for n in (2, 2))
    never = engine.add_request(PROMPT, drawn | {"n": 5})
    assert engine._loop.scheduler.num_waiting == 2
    done = finished(engine)
    assert done[fits].error is None and len(done[fits].others) == 1
    assert done[full].error == "the queue is full (2 waiting, at most 3): step() first"
    assert "n is 5, and max_waiting is 3" in done[never].error


def test_limits_may_be_raised_again_and_survive_a_release(tiny):
    for engine in (
        Engine(tiny("llama"), max_num_seqs=16, keep_memory=keep) for keep in (True, False)
    ):
        for calls in range(2):
            engine.max_num_seqs, engine.max_num_batched_tokens = 4, 32
            engine.max_num_seqs = 16
            assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (16, 32)
            engine.max_num_seqs = 2
            engine.generate([PROMPT] * 3, GREEDY)
            assert engine.stats.steps_log[:, 1].max() == 2, f"in call {calls}"
            engine.release()
            assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (2, 32)


@pytest.mark.parametrize("bad", [0, 17, 2.5, "a", None, True])
def test_limits_are_whole_numbers_within_their_range(tiny, bad):
    engine = Engine(tiny("llama"), max_num_seqs=16)
    with pytest.raises(ValueError, match=f"^max_num_seqs is {bad!r}; "):
        engine.max_num_seqs = bad
    if bad != 17:
        with pytest.raises(ValueError, match=f"^max_num_batched_tokens is {bad!r}; "):
            engine.max_num_batched_tokens = bad
    assert engine.max_num_seqs == 16


def test_completions_have_the_prompt_as_the_model_saw_it(tiny):
    tokenizer = FakeTokenizer(bos_token_id=1, add_bos=True)
    engine = Engine(tiny("llama"), tokenizer, max_model_len=8, max_waiting=1)
    text, ids, long, bad = engine.generate(["ab", [3, 4], [5] * 9, [3, 97]], GREEDY)
    assert text.prompt_token_ids == [1, 65, 66] and ids.prompt_token_ids == [3, 4]
    assert long.error and long.prompt_token_ids == [5] * 9, "also if the request is rejected"
    assert bad.error and bad.prompt_token_ids is None
    (done,) = engine.generate([[3, 4]], {"n": 2, "max_tokens": 2})
    assert done.prompt_token_ids == done.others[0].prompt_token_ids == [3, 4]
