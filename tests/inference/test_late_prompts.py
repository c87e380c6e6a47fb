"""A call reads its prompts while steps run; what it finds late is told as what it finds early."""

from __future__ import annotations

import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine, SamplingParams
from nopad.inference.request_runner import MIN_QUEUED
from nopad.inference.requests.prompt_spec import broadcast_params
from nopad.inference.requests.request_builder import running_order
from nopad.inference.scheduling.loop import StepLoop

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + i % 90, 4, 5] for i in range(5 * MIN_QUEUED)]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "debug": True}


class CountingTokenizer(FakeTokenizer):
    """Counts the texts that it has tokenized."""

    num_texts = 0

    def __call__(self, text, add_special_tokens=True):
        self.num_texts += 1
        return super().__call__(text, add_special_tokens)


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), CountingTokenizer(bos_token_id=1, eos_token_id=0), **OPTIONS)


def count_at_first_step(engine, monkeypatch, prompts) -> int:
    tokenizer, counts, step = engine._tokenizer.tokenizer, [], StepLoop.step
    monkeypatch.setattr(
        StepLoop, "step", lambda s: (counts.append(tokenizer.num_texts), step(s))[1]
    )
    tokenizer.num_texts = 0
    completions = engine.generate(prompts, GREEDY)
    assert tokenizer.num_texts == len(prompts) == len(completions)
    return counts[0]


def test_texts_are_tokenized_while_steps_run(engine, monkeypatch):
    texts = [chr(97 + i % 26) * 3 for i in range(3 * MIN_QUEUED)]
    first = engine.generate(texts, GREEDY)
    engine.reset_prefix_cache()
    assert count_at_first_step(engine, monkeypatch, texts) == MIN_QUEUED
    assert engine.generate(texts, GREEDY) == first
    alone = {text: engine.generate([text], GREEDY)[0] for text in set(texts)}
    assert first == [alone[text] for text in texts]


def test_before_the_engine_is_built_all_prompts_are_read(engine, monkeypatch):
    with pytest.raises(ValueError, match=f"prompt {len(PROMPTS)}: "):
        engine.generate([*PROMPTS, [5, 0.5]], GREEDY)
    assert engine._executor is None
    assert count_at_first_step(engine, monkeypatch, ["ab"] * 200) == 200


@pytest.mark.parametrize(
    ("keep_memory", "bad", "told"),
    [
        (True, [5, 0.5], "a prompt is a list; .* flat list of ids"),
        (False, {"input_ids": [[5]], "attention_mask": [1]}, "TypeError: "),
    ],
)
def test_a_fault_found_late_ends_its_call_alone(tiny, keep_memory, bad, told):
    engine = Engine(tiny("llama"), keep_memory=keep_memory, **OPTIONS)
    (want,), others = engine.generate([[7, 8, 9]], LONG), engine.generate(PROMPTS, GREEDY)
    beside = engine.add_request([7, 8, 9], LONG)
    executor, finished = engine._executor, []
    with pytest.raises(ValueError, match=f"^prompt {len(PROMPTS)}: {told}"):
        engine.generate([*PROMPTS, bad], GREEDY, progress=finished.append)
    assert 0 < sum(finished) < len(PROMPTS), "the fault was to be found late"
    assert engine._executor is executor
    events = [event for _ in range(60) for event in engine.step() if event.completion]
    assert [(e.request_id, e.completion) for e in events] == [(beside, want)]
    assert engine._executor is None or not engine._loop.busy
    assert engine.generate(PROMPTS, GREEDY) == others


def test_a_fault_found_as_other_requests_end_is_told(engine):
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.generate(PROMPTS[:1], params)
    executor = engine._executor
    with pytest.raises(ValueError, match=f"^prompt {len(PROMPTS)}: "):
        engine.generate([*PROMPTS, [5, 0.5]], params)
    assert engine._executor is executor and not engine._outputs.has_requests()


def test_a_fault_of_a_call_inside_another_ends_both(engine, tiny):
    inner = Engine(tiny("llama"), **OPTIONS)
    want = engine.generate(PROMPTS, GREEDY)
    with pytest.raises(ValueError, match=r"^prompt 0: a prompt is a list"):
        engine.generate(PROMPTS, GREEDY, progress=lambda _: inner.generate([[5, 0.5]], GREEDY))
    assert not engine._outputs.has_requests()
    assert engine.generate(PROMPTS, GREEDY) == want


def test_a_call_inside_another_does_not_release_what_that_one_needs(tiny):
    engine = Engine(tiny("llama"), keep_memory=False, max_waiting=4, **OPTIONS)
    (inner,), want = engine.generate([[7, 8]], GREEDY), engine.generate(PROMPTS[:40], GREEDY)
    assert engine._executor is None
    seen = []

    def on_progress(_):
        seen.extend(engine.generate([[7, 8]], GREEDY))

    assert engine.generate(PROMPTS[:40], GREEDY, progress=on_progress) == want
    assert seen and all(each == inner for each in seen) and engine._executor is None


def test_a_stream_queues_what_is_tokenized_at_once(engine):
    engine.generate(PROMPTS[:2], GREEDY)
    stream = engine.stream(PROMPTS, GREEDY)
    next(stream)
    scheduler = engine._loop.scheduler
    assert scheduler.num_waiting + len(scheduler.running) == len(PROMPTS)
    stream.close()


def test_latencies_begin_with_the_call(engine, monkeypatch):
    engine.generate(PROMPTS, GREEDY)
    since = []
    monkeypatch.setattr(engine.stats, "record_queued", lambda request, now: since.append(now))
    engine.generate(PROMPTS, GREEDY)
    assert len(since) == len(PROMPTS) and len(set(since)) == 1


def test_the_order_is_by_priority_then_new_tokens_then_length():
    prompts = ["ab", [1, 2, 3], "abc", [1] * 90, [5]]
    params = [{"max_tokens": n} for n in (8, 8, 8, 16, 2)]
    specs = broadcast_params(prompts, params, priority=[0, 0, 0, 0, -1])
    assert running_order(specs, 1000) == [4, 3, 1, 2, 0]
    assert running_order(specs, 95) == [4, 1, 2, 0, 3]  # 90 tokens leave room for five
    rows = {"input_ids": [[5], [6] * 50, [7] * 10], "attention_mask": [[1], [1] * 50, [1] * 10]}
    assert running_order(broadcast_params(rows, {"max_tokens": 8}), 1000) == [1, 2, 0]
    chats = [[{"role": "user", "content": "x" * n}] for n in (8, 80)]
    assert running_order(broadcast_params(chats, {"max_tokens": 8}), 1000) == [1, 0]
