"""Calls from several threads: each gets its own results, and the model is returned as it was."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, nullcontext
from threading import Barrier, Event, Thread
from unittest.mock import patch

import pytest
import torch
from nopad.inference import DataParallelEngine, Engine, batch_invariant
from nopad.inference.executor import BuildKey
from nopad.inference.scheduling.cache_checker import check_scheduler

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
        thread.join(200)
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
        check_scheduler(engine._loop.scheduler)


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


def test_a_call_inside_a_stream_does_not_wait_for_itself(model):
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


@contextmanager
def company(engine, count: int):
    """Hold the first step inside until `count` other threads wait; yield a list of all steps."""
    steps = []

    def wait(*_):
        end = time.monotonic() + 120
        while not steps and len(engine._lock._queue) < count and time.monotonic() < end:
            time.sleep(0.001)
        steps.append(len(engine._runner._calls))

    hook = engine._model.register_forward_pre_hook(wait)
    try:
        yield steps
    finally:
        hook.remove()


LONG = GREEDY | {"max_tokens": 24}


def test_calls_of_several_threads_share_steps(model):
    engine, prompts = Engine(model, page_size=16), [[5 + k, 6, 7] for k in range(8)]
    want = [c.token_ids for c in engine.generate(prompts, LONG)]
    reported = [[] for _ in prompts]

    def call(k: int):
        (done,) = engine.generate([prompts[k]], LONG, progress=reported[k].append)
        return done.token_ids

    with company(engine, 7) as steps:
        assert in_threads([lambda k=k: call(k) for k in range(8)]) == want
    assert reported == [[1]] * 8
    assert len(steps) <= 24 + 1, "one step of the first call alone"


def test_scores_of_several_threads_share_steps(model):
    engine = Engine(model, page_size=16)
    want = [score.logprob for score in engine.score(PROMPTS, [[8, 9]] * 4)]
    with company(engine, 3) as steps:
        got = in_threads([lambda k=k: engine.score([PROMPTS[k]], [[8, 9]]) for k in range(4)])
    assert [score.logprob for (score,) in got] == pytest.approx(want, abs=1e-4)
    assert len(steps) <= 2


def fail(*_):
    raise RuntimeError("seeded fault")


@pytest.mark.parametrize("fault", ["a step", "progress", "a prompt"])
def test_a_fault_of_one_call_harms_no_call_that_shares_its_steps(model, fault):
    engine = Engine(model, page_size=16)
    want = [c.token_ids for c in engine.generate(PROMPTS, LONG)]
    executor = engine._executor

    def faulty():
        prompts = [PROMPTS[0], object()] if fault == "a prompt" else PROMPTS[:2]
        progress = fail if fault == "progress" else False
        params = [GREEDY, LONG]  # the first one is done, and reported, while others run
        return engine.generate(prompts, params, progress=progress)[1].token_ids

    def fail_once(*_):
        if fault == "a step" and len(engine._runner._calls) == 4:
            hook.remove()
            fail()

    hook = model.register_forward_pre_hook(fail_once)
    others = [lambda k=k: engine.generate([PROMPTS[k]], LONG)[0].token_ids for k in (2, 3, 0)]
    with company(engine, 2 if fault == "a prompt" else 3):
        results = in_threads([faulty, *others])
    hook.remove()
    (failed,) = [k for k, result in enumerate(results) if isinstance(result, Exception)]
    assert str(results[failed]).startswith(("seeded fault", "prompt 1:"))
    assert fault == "a step" or (failed == 0 and engine._executor is executor)
    right = [want[1], want[2], want[3], want[0]]
    assert [r for r in results if r is not results[failed]] == right[:failed] + right[failed + 1 :]
    assert not engine._outputs.has_requests() and all(m.training for m in model.modules())


@pytest.mark.parametrize("how", ["autocast", "batch_invariant"])
def test_a_call_that_computes_otherwise_does_not_share_steps(model, how):
    engine = Engine(model, page_size=16)
    params = LONG | {"logprobs": 0}

    def mode():
        return torch.autocast("cpu", torch.bfloat16) if how == "autocast" else batch_invariant(64)

    def call(k: int, within=nullcontext):
        with within():
            return engine.generate([PROMPTS[k]], params)[0]

    with mode():
        (want,) = Engine(model, page_size=16).generate([PROMPTS[0]], params)
    plain = [Engine(model, page_size=16).generate([p], GREEDY)[0].token_ids for p in PROMPTS]
    engine.generate([[1, 2]], GREEDY)
    with company(engine, 3):
        calls = [lambda k=k: call(k) for k in (1, 2, 3)]
        *others, got = in_threads([*calls, lambda: call(0, mode)])
    assert got == want
    assert [c.token_ids[:8] for c in others] == plain[1:]


def test_a_released_engine_runs_the_calls_of_other_threads_again(model):
    engine = Engine(model, page_size=16)
    want = [c.token_ids for c in engine.generate(PROMPTS, LONG)]
    calls = [lambda k=k: engine.generate([PROMPTS[k]], LONG)[0].token_ids for k in range(4)]
    with company(engine, 3):
        *got, _ = in_threads([*calls, engine.release])
    assert got == want


def test_modules_that_come_while_calls_run_hold_up_none_of_them(model):
    engine, running = Engine(model, page_size=16), Event()
    want = [c.token_ids for c in engine.generate(PROMPTS[:2], LONG)]

    def change_and_join():
        running.wait(120)
        with engine._lock:  # between two steps
            model.more = torch.nn.Linear(2, 2)
        return engine.generate([PROMPTS[1]], LONG)[0].token_ids

    hook = model.register_forward_pre_hook(lambda *_: running.set())
    try:
        assert (
            in_threads([lambda: engine.generate([PROMPTS[0]], LONG)[0].token_ids, change_and_join])
            == want
        )
    finally:
        hook.remove()
        del model.more


@contextmanager
def first_step(model):
    """Yield an event that is set in the first step."""
    running = Event()
    hook = model.register_forward_pre_hook(lambda *_: running.set())
    try:
        yield running
    finally:
        hook.remove()


def _write_data(model):
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data.mul_(-1.0)
    return lambda: weight.data.mul_(-1.0)


def _add_hook(model):
    mlp = model.model.layers[0].mlp
    return mlp.register_forward_hook(lambda _module, _args, output: -output).remove


def _set_scaling(model):
    attention = model.model.layers[0].self_attn
    before, attention.scaling = attention.scaling, 20.0
    return lambda: setattr(attention, "scaling", before)


@pytest.mark.parametrize("change", [_write_data, _add_hook, _set_scaling])
def test_a_call_that_joins_notices_what_changed_before_it(model, change):
    engine, prompt = Engine(model, page_size=16), [*range(3, 60)]
    joined, undo = [], []

    def change_and_join():
        running.wait(120)
        with engine._lock:  # between two steps
            joined.extend(engine._runner._calls)
            undo.append(change(model))
        return engine.score([prompt], [[8, 9]])[0].logprob

    with first_step(model) as running:
        # The hook is a change, too: a prefix from before it would not be used.
        before = engine.score([prompt], [[8, 9]])[0].logprob
        running.clear()
        try:
            _, got = in_threads([lambda: engine.generate([[5, 6]], LONG), change_and_join])
            want = Engine(model).score([prompt], [[8, 9]])[0].logprob
        finally:
            undo[0]()
    assert joined and abs(want - before) > 1e-3
    assert got == pytest.approx(want, abs=1e-5)


def test_progress_may_wait_for_the_call_of_another_thread(model):
    engine, is_done = Engine(model, page_size=16), Event()
    want = [c.token_ids for c in engine.generate(PROMPTS[:3], LONG)]

    def wait(_):
        assert is_done.wait(120)

    def call():
        done = engine.generate(PROMPTS[:2], [GREEDY, LONG], progress=wait)
        return [c.token_ids for c in done]

    def other():
        running.wait(120)
        (done,) = engine.generate(PROMPTS[2:3], LONG)
        is_done.set()
        return done.token_ids

    with first_step(model) as running:
        assert in_threads([call, other]) == [[want[0][:8], want[1]], want[2]]


@pytest.mark.parametrize("within", [nullcontext, lambda: batch_invariant(64)])
def test_progress_may_generate_while_other_threads_run(model, within):
    engine = Engine(model, page_size=16)
    want, seen = [c.token_ids for c in engine.generate(PROMPTS, LONG)], []

    def inner(_):
        seen.extend(engine.generate(PROMPTS[3:], GREEDY))

    def call(k: int):
        with within():
            done = engine.generate([PROMPTS[k], PROMPTS[0]], [GREEDY, LONG], progress=inner)
        return [c.token_ids for c in done]

    got = in_threads([lambda k=k: call(k) for k in range(3)])
    assert got == [[want[k][:8], want[0]] for k in range(3)]
    assert len(seen) == 6 and all(c.token_ids == want[3][:8] for c in seen)


def test_progress_may_not_generate_under_another_autocast(model):
    """The prompts that the outer call has not read yet would be computed in another dtype."""
    engine = Engine(model, page_size=16, max_num_batched_tokens=3 * 64)  # a step ends 64 prompts
    prompts = [[3 + k % 90, 4, 5] for k in range(200)]
    one = GREEDY | {"max_tokens": 1}
    engine.generate(prompts[:1], one)

    def inner(_):
        with torch.autocast("cpu", torch.bfloat16):
            engine.generate(PROMPTS[:1], GREEDY)

    (refused,) = in_threads([lambda: engine.generate(prompts, one, progress=inner)])
    assert isinstance(refused, ValueError) and "the model is now in" in str(refused)


def test_a_call_that_another_thread_has_finished_holds_up_no_third_one(model):
    engine = Engine(model, page_size=16)
    engine.generate(PROMPTS[:1], GREEDY)

    def finish_all():
        running.wait(120)
        with engine._lock:  # all steps are this thread's
            engine.generate(PROMPTS[1:2], LONG | {"max_tokens": 40})

    with first_step(model) as running:
        in_threads([lambda: engine.generate(PROMPTS[:1], LONG), finish_all])
    (third,) = in_threads([lambda: engine.generate(PROMPTS[:1], GREEDY)])
    assert third[0].error is None and engine._runner._driver is None


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("starts", ["before", "after"])
def test_progress_may_wait_for_a_call_while_another_autocast_waits(model, starts):
    """The call that is waited for joins, or nobody would continue."""
    engine, is_done, order = Engine(model, page_size=16), Event(), []
    entrance, reports = engine._runner._entrance, Event()
    engine.generate(PROMPTS[:1], GREEDY)

    def wait(_):
        reports.set()
        order.append(is_done.wait(20))

    def call():
        engine.generate(PROMPTS[:2], [GREEDY, LONG], progress=wait)

    def otherwise():
        wait_for(lambda: engine._runner._calls)
        with torch.autocast("cpu", torch.bfloat16):
            engine.generate(PROMPTS[1:2], GREEDY)
        order.append("otherwise")

    def joins():
        wait_for(lambda: entrance.depth)
        if starts == "after":
            reports.wait(120)
        engine.generate(PROMPTS[2:3], GREEDY)
        is_done.set()

    def wait_for_company(*_):
        wait_for(lambda: engine._lock.has_waiters or entrance.depth)
        if entrance.depth:
            hook.remove()

    hook = model.register_forward_pre_hook(wait_for_company)
    in_threads([call, otherwise, joins])
    hook.remove()
    assert order == [True, True, "otherwise"]


def test_a_call_that_computes_otherwise_runs_before_later_ones(model):
    engine, order = Engine(model, page_size=16), []
    entrance, waiting = engine._runner._entrance, engine._runner._changed._waiters

    def wait_for_company(*_):
        wait_for(lambda: engine._lock.has_waiters or len(waiting) == 2)
        if len(waiting) == 2:
            hook.remove()

    def otherwise():
        wait_for(lambda: engine._runner._calls)
        with torch.autocast("cpu", torch.bfloat16):
            engine.generate(PROMPTS[1:2], GREEDY)
        order.append("otherwise")

    def later():
        wait_for(lambda: entrance._owner)
        engine.generate(PROMPTS[2:3], GREEDY)
        order.append("later")

    hook = model.register_forward_pre_hook(wait_for_company)
    in_threads([lambda: engine.generate(PROMPTS[:1], LONG), otherwise, later])
    hook.remove()
    assert order == ["otherwise", "later"]


def test_calls_on_two_cuda_streams_do_not_share_steps(model, monkeypatch):
    key, streams = BuildKey(torch.device("cuda"), torch.float32, None, ()), iter([1, 1, 2])
    monkeypatch.setattr("nopad.inference.session.build_key", lambda *_: key)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: next(streams))
    session = Engine(model)._session
    first, same, other = (session.sharing_key() for _ in range(3))
    assert first == same != other


def test_memory_is_kept_between_the_steps_of_shared_calls(model):
    engine = Engine(model, page_size=16, max_num_batched_tokens=3 * 64, keep_memory=False)
    prompts, one = [[3 + k % 90, 4, 5] for k in range(200)], GREEDY | {"max_tokens": 1}
    build = patch.object(engine._session, "_build", wraps=engine._session._build)
    with build as build, company(engine, 1):
        in_threads([lambda: engine.generate(prompts, one)] * 2)
    assert build.call_count == 1 and engine._executor is None
