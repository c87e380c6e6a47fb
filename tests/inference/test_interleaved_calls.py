"""Streams, blocking calls, added requests and scores in any order: each gets its own results."""

from __future__ import annotations

from functools import cache, partial
from itertools import zip_longest
from unittest.mock import patch

import pytest
from fake_tokenizer import FakeTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nopad.inference import Engine
from nopad.inference.requests.outputs import Completion
from nopad.inference.scheduling.loop import StepLoop

PAGE = 16 * 2 * 2 * 2 * 8 * 4
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TOKENIZER = FakeTokenizer(
    eos_token_id=0,
    bos_token_id=1,
    encoding="utf-8",
    hidden=3,
    to_token=lambda byte: 3 + byte % 94,
    to_byte=lambda token: token * 37 % 256,  # characters break across tokens
)


REQUESTS = [
    ("hello there", GREEDY),
    ("hello there, you", GREEDY | {"max_tokens": 9, "stop": ["\N{REPLACEMENT CHARACTER}"]}),
    ("x", {"temperature": 1.0, "max_tokens": 5, "seed": 3, "n": 2}),
    ("some longer text that takes three pages of sixteen", GREEDY | {"max_tokens": 1}),
    ("", GREEDY),
    ("some longer text that takes three pages", {"temperature": 0.7, "max_tokens": 14, "seed": 1}),
]
SCORED = [("hello there", ", you"), ("x", "yz")]


class Record:
    """The events of one request."""

    def __init__(self, which: int):
        self.which = which
        self.token_ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.done: list[Completion] = []

    def add(self, event) -> None:
        assert not self.done, "something comes after the completion"
        self.token_ids.setdefault(event.sample_index, []).extend(event.token_ids)
        self.text[event.sample_index] = self.text.get(event.sample_index, "") + event.text
        if event.completion is not None:
            self.done.append(event.completion)


def all_of(completion: Completion) -> list[Completion]:
    return [completion, *completion.others]


class Caller:
    """Makes calls on one engine and records their events."""

    def __init__(self, engine: Engine, alone):
        self.engine, self.alone = engine, alone
        self.submitted: dict[int, Record] = {}
        self.streams: list[tuple] = []

    def submit(self, i: int) -> None:
        which = i % len(REQUESTS)
        self.submitted[self.engine.add_request(*REQUESTS[which])] = Record(which)

    def step(self, _: int = 0) -> None:
        for event in self.engine.step():
            self.submitted[event.request_id].add(event)

    def cancel(self, i: int) -> None:
        if self.submitted:
            self.engine.abort(list(self.submitted)[i % len(self.submitted)])

    def stream(self, i: int) -> None:
        which = [(i + k) % len(REQUESTS) for k in range(1 + i % 3)]
        prompts, params = zip(*(REQUESTS[w] for w in which), strict=True)
        self.streams.append((self.engine.stream(prompts, params), [Record(w) for w in which]))

    def next(self, i: int) -> bool:
        if not self.streams:
            return False
        events, records = self.streams[i % len(self.streams)]
        event = next(events, None)
        if event is not None:
            records[event.request_id].add(event)
        return event is not None

    def close(self, i: int) -> None:
        if self.streams:
            events, records = self.streams.pop(i % len(self.streams))
            events.close()
            for record in records:
                self.check_beginning(record)

    def generate(self, i: int) -> None:
        which = [(i + k) % len(REQUESTS) for k in range(1 + i % 2)]
        prompts, params = zip(*(REQUESTS[w] for w in which), strict=True)
        assert self.engine.generate(prompts, params) == [self.alone(w) for w in which]

    def score(self, i: int) -> None:
        context, continuation = SCORED[i % 2]
        (score,) = self.engine.score([context], [continuation])
        assert score.logprob == pytest.approx(self.alone(~(i % 2)), abs=1e-4)

    def release(self, _: int) -> None:
        self.engine.release()

    def fault(self, _: int) -> None:
        def fail(*_):
            raise RuntimeError("seeded fault")

        hook = self.engine._model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="seeded fault"):
            self.engine.generate(["x"], GREEDY)
        hook.remove()

    def finish(self) -> None:
        while sum(self.next(k) for k in range(len(self.streams))):
            pass
        while self.engine._outputs.has_requests() or self.engine._events:
            self.step()
        for record in (*self.submitted.values(), *(r for _, them in self.streams for r in them)):
            assert len(record.done) == 1, "one completion each"
            self.check(record)

    def check(self, record: Record) -> None:
        (done,), want = record.done, self.alone(record.which)
        if done.error is not None and want.error is None:
            full = record in self.submitted.values() and "queue is full" in done.error
            assert full or "released" in done.error or "RuntimeError" in done.error
            self.check_beginning(record)
        elif any(c.finish_reason == "abort" for c in all_of(done)):
            self.check_beginning(record)
            assert [record.text.get(k, "") for k in range(len(all_of(done)))] == [
                c.text for c in all_of(done)
            ]
        else:
            assert done == want
            for k, one in enumerate(all_of(done)):
                assert record.token_ids.get(k, []) == one.token_ids
                assert record.text.get(k, "") == (one.text or "")

    def check_beginning(self, record: Record) -> None:
        whole = all_of(self.alone(record.which))
        for k, tokens in record.token_ids.items():
            assert whole[k].token_ids[: len(tokens)] == tokens


@pytest.fixture(scope="module")
def alone(tiny):
    """The completion of a request by an engine of its own; for negative indices, a score."""

    @cache
    def answer(which: int):
        engine = Engine(tiny("llama"), TOKENIZER, page_size=16)
        if which < 0:
            context, continuation = SCORED[~which]
            return engine.score([context], [continuation])[0].logprob
        prompt, params = REQUESTS[which]
        return engine.generate([prompt], params)[0]

    return answer


KINDS = ("submit", "step", "step", "cancel", "stream", "next", "next", "next", "close")
KINDS += ("generate", "score", "release", "fault")


ANY_ORDER = given(
    calls=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), max_size=25),
    running=st.integers(1, 4),
    waiting=st.sampled_from([None, 2, 5]),
    pages=st.sampled_from([5, 64]),
    keep=st.booleans(),
    depth=st.integers(0, 1),
)


def in_this_order(model, alone, calls, running, waiting, pages, keep, depth) -> None:
    with patch("nopad.inference.executor.StepLoop", partial(deep, depth)):
        engine = Engine(
            model, TOKENIZER, page_size=16, max_num_seqs=running, max_waiting=waiting,
            max_num_batched_tokens=40, memory=pages * PAGE, keep_memory=keep,
        )  # fmt: skip
        caller = Caller(engine, alone)
        for kind, i in calls:
            getattr(caller, kind)(i)
            assert engine._executor is None or engine._loop.scheduler.num_waiting >= 0
        caller.finish()
    assert keep or engine._executor is None


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@ANY_ORDER
def test_whatever_comes_between_every_request_gets_what_it_gets_alone(tiny, alone, **how):
    in_this_order(tiny("llama"), alone, **how)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@ANY_ORDER
def test_a_thousand_orders_of_calls_are_as_good_as_a_few(tiny, alone, **how):
    in_this_order(tiny("llama"), alone, **how)


def deep(depth: int, *parts, **named) -> StepLoop:
    """A loop with steps in flight, as on a GPU."""
    loop = StepLoop(*parts, **named)
    loop._lookahead = depth
    return loop


def streamed(events) -> tuple[str, Completion | None]:
    events = list(events)
    return "".join(e.text for e in events), events[-1].completion


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), TOKENIZER, page_size=16)


def test_streams_read_in_turn_get_their_own(engine):
    prompts = ["hello there", "some text"]
    want = [[(c.text, c)] for c in engine.generate(prompts, GREEDY)]
    both = [engine.stream([prompt], GREEDY) for prompt in prompts]
    first, second = zip(*zip_longest(*both), strict=True)
    assert [[streamed(e for e in first if e)], [streamed(e for e in second if e)]] == want


@pytest.mark.parametrize("what", ["generate", "score"])
def test_a_blocking_call_between_two_events_takes_nothing_from_the_stream(engine, what):
    (want,) = engine.generate(["hello there"], GREEDY)
    events = engine.stream(["hello there"], GREEDY)
    seen = [next(events), next(events)]
    other = {"generate": (["x"], GREEDY | {"max_tokens": 20}), "score": (["x"], ["yz"])}[what]
    getattr(engine, what)(*other)
    assert streamed([*seen, *events]) == (want.text, want)
    assert engine.step() == []


@pytest.mark.parametrize("waiting", [None, 1])
def test_an_engine_that_keeps_nothing_streams_as_well(tiny, waiting):
    engine = Engine(
        tiny("llama"), TOKENIZER, keep_memory=False, max_num_seqs=1, max_waiting=waiting
    )
    prompts = ["hello there", "", "x", "yz"]
    want = engine.generate(prompts, GREEDY)
    done = {}
    for event in engine.stream(prompts, GREEDY):
        if event.completion is not None:
            done[event.request_id] = event.completion
            assert engine.generate(["some text"], GREEDY)[0].error is None
    assert [done[i] for i in range(4)] == want and engine._executor is None


def test_a_stream_left_early_leaves_the_queue_as_it_was(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=1, max_waiting=1)
    for _ in range(2):
        events = engine.stream([[5, 6], [7, 8], [9, 10], [11, 12]], GREEDY)
        next(events)
        events.close()
        assert engine._loop.scheduler.num_waiting == 0 and not engine._loop.busy
