"""A call reads its prompts while steps run; what it finds late is told as what it finds early."""

from __future__ import annotations

import pytest
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine, SamplingParams
from nopad.inference.request_runner import MIN_QUEUED
from nopad.inference.requests.request_builder import broadcast_params, running_order
from nopad.inference.scheduling.loop import StepLoop

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[3 + i % 90, 4, 5] for i in range(7 * MIN_QUEUED)]
BAD = [*PROMPTS[:-1], [5, 0.5]]


class CountingTokenizer(FakeTokenizer):
    """Counts the texts that it has tokenized."""

    num_texts = 0

    def __call__(self, text, add_special_tokens=True):
        self.num_texts += 1
        return super().__call__(text, add_special_tokens)


@pytest.fixture
def engine(tiny):
    options = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "debug": True}
    return Engine(tiny("llama"), CountingTokenizer(bos_token_id=1, eos_token_id=0), **options)


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
    with pytest.raises(ValueError, match=f"prompt {len(BAD) - 1}: "):
        engine.generate(BAD, GREEDY)
    assert engine._executor is None
    assert count_at_first_step(engine, monkeypatch, ["ab"] * 200) == 200


@pytest.mark.parametrize("keep_memory", [True, False])
def test_a_fault_found_late_ends_its_call_alone(tiny, keep_memory):
    options = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "debug": True}
    engine = Engine(tiny("llama"), keep_memory=keep_memory, **options)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (want,), others = engine.generate([[7, 8, 9]], long), engine.generate(PROMPTS, GREEDY)
    beside = engine.add_request([7, 8, 9], long)
    executor, finished = engine._executor, []
    with pytest.raises(ValueError, match=f"^prompt {len(BAD) - 1}: .* flat list of ids"):
        engine.generate(BAD, GREEDY, progress=finished.append)
    assert 0 < sum(finished) < len(BAD), "the fault was to be found late"
    assert engine._executor is executor
    events = [event for _ in range(60) for event in engine.step() if event.completion]
    assert [(e.request_id, e.completion) for e in events] == [(beside, want)]
    assert engine._executor is None or not engine._loop.busy
    assert engine.generate(PROMPTS, GREEDY) == others


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
