"""The engine's promises to its callers: one completion each, faults kept apart, quiet logs."""

from __future__ import annotations

import inspect
import json
import logging
import random
import re

import numpy as np
import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.requests.detokenizer import Detokenizer, find_stop

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Letters:
    """A tokenizer of one token a byte, so that characters break across tokens."""

    eos_token_id, bos_token_id = 0, 1

    def __call__(self, text, add_special_tokens=True):
        return {
            "input_ids": [
                *([1] if add_special_tokens else []),
                *(3 + b % 94 for b in text.encode()),
            ]
        }

    def decode(self, tokens, skip_special_tokens=True):
        return bytes((t - 3) % 94 + 32 for t in tokens if t > 2).decode(errors="replace")

    def apply_chat_template(self, messages, **_):
        return {"input_ids": self("".join(m["content"] for m in messages))["input_ids"]}


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), Letters(), page_size=16)


BAD = {
    "empty": ([], GREEDY, "empty"),
    "too long": (list(range(3, 90)) * 4, GREEDY, "max_model_len is 256"),
    "beyond the vocabulary": ([3, 97], GREEDY, "97 is not in the vocabulary of 97: is the tok"),
    "negative id": ([3, -1], GREEDY, "-1 is not in the vocabulary"),
    "not ids": ([0.5, 1.5], GREEDY, "flat list of ids"),
    "nested": ([[3, 4]], GREEDY, "flat list of ids"),
    "nothing": (None, GREEDY, "prompt is a"),
    "negative temperature": ([3], {"temperature": -1}, "temperature is -1"),
    "unknown parameter": ([3], {"heat": 1}, "heat"),
    "empty stop string": ([3], {"stop": ""}, None),
    "stop of nothing": ([3], {"stop": [""]}, "at least one character"),
    "bias off the vocabulary": ([3], {"logit_bias": {500: 1.0}}, "500 is not in the vocabulary"),
    "more than the most": ([3], {"max_tokens": 2, "min_tokens": 3}, "lower the one or raise"),
    "no tokens wanted": ([3], {"max_tokens": 0}, "max_tokens is 0"),
    "not a number": ([3], {"temperature": float("nan")}, "temperature is nan"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_says_why_and_the_others_are_unharmed(engine, case):
    prompt, params, message = BAD[case]
    good = [[5, 6, 7], [8, 9]]
    out = engine.generate([good[0], prompt, good[1]], [GREEDY, params, GREEDY])
    alone = [c.token_ids for c in engine.generate(good, GREEDY)]
    assert [out[0].token_ids, out[2].token_ids] == alone
    if message is None:
        assert out[1].error is not None or out[1].finish_reason in ("stop", "length")
    else:
        assert out[1].finish_reason == "error" and message in out[1].error
        assert out[1].token_ids == []


def test_mixes_of_good_and_poisonous_requests_always_return_one_completion_each(tiny, monkeypatch):
    """B6: bad ids, empty prompts, bad settings and NaN logits, in 1000 random mixes."""
    model = tiny("llama")
    engine = Engine(model, page_size=16)
    poison = 96  # a request that contains it gets logits that are not numbers
    runner = None
    kinds = {"good": [5, 6], "nan": [5, poison], "id": [5, 400], "empty": [], "type": "text"}
    want = engine.generate([[5, 6]], GREEDY)[0].token_ids
    runner = engine._machine.runner
    real = runner._forward

    def poisoned(step):
        logits = real(step)
        bad = [r for r, q in enumerate(step.yielding) if poison in q.prompt]
        return logits.index_fill(0, torch.tensor(bad, dtype=torch.int64), torch.nan)

    monkeypatch.setattr(runner, "_forward", poisoned)
    rng = random.Random(0)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in range(1000):
        names = [rng.choice(list(kinds)) for _ in range(rng.randint(1, 4))]
        out = engine.generate([kinds[name] for name in names], short)
        assert len(out) == len(names)
        for name, completion in zip(names, out, strict=True):
            if name == "good":
                assert completion.token_ids == want[:2] and completion.error is None
            else:
                assert completion.finish_reason == "error" and completion.error
    engine._machine.loop.scheduler.check()


def test_a_request_the_cache_can_never_hold_is_refused_and_the_others_run(tiny):
    engine = Engine(tiny("llama"), page_size=16, memory=2 * 16 * 2 * 2 * 2 * 8 * 4)
    out = engine.generate([[5] * 20, [5] * 30], SamplingParams(temperature=0, max_tokens=5))
    assert out[0].error is None and "the cache holds 32" in out[1].error


@pytest.mark.parametrize("where", ["_forward", "_sample", "copy_pages"])
def test_a_fault_of_the_engine_raises_and_the_next_call_works(tiny, where, monkeypatch):
    engine = Engine(tiny("llama"), page_size=64)
    prompt = list(range(3, 60))
    want = engine.generate([prompt], GREEDY)[0].token_ids

    def fault(*_):
        raise RuntimeError("seeded fault")

    monkeypatch.setattr(engine._machine.runner, where, fault)
    with pytest.raises(RuntimeError, match="seeded fault"):
        engine.generate([prompt, [*prompt, 4]], GREEDY)
    assert engine.generate([prompt], GREEDY)[0].token_ids == want


def test_refused_models_say_why():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="bloom"):
        Engine(model, max_model_len=64).generate([[3]], GREEDY)


def test_streamed_events_add_up_to_the_completion(engine):
    prompts = ["hello there", [5, 6, 7], []]
    want = engine.generate(prompts, GREEDY)
    tokens, text, done = {0: [], 1: [], 2: []}, {0: "", 1: "", 2: ""}, {}
    for event in engine.stream(prompts, GREEDY):
        tokens[event.request_id] += event.token_ids
        text[event.request_id] += event.text
        if event.completion is not None:
            done[event.request_id] = event.completion
    assert [done[i] for i in range(3)] == want
    assert [tokens[i] for i in range(3)] == [c.token_ids for c in want]
    assert [text[0], text[1]] == [want[0].text, want[1].text]


def test_a_stream_left_early_cancels_its_requests(engine):
    for event in engine.stream([[5, 6, 7]] * 3, SamplingParams(temperature=0, max_tokens=50)):
        assert event.token_ids
        break
    assert not engine._machine.loop.busy
    engine._machine.loop.scheduler.check()


def test_stop_strings_end_the_text_even_across_tokens(engine):
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = engine.generate(["hello"], long)[0].text
    stop = whole[7:10]
    cut = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=["never there", stop])
    got = engine.generate(["hello"], cut)[0]
    assert got.text == whole[: whole.find(stop)] and got.finish_reason == "stop"
    streamed = "".join(event.text for event in engine.stream(["hello"], cut))
    assert streamed == got.text


def test_text_is_held_back_until_a_character_is_whole():
    letters = "aé✓".encode()
    text = Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))
    pieces = [text.push([b]) for b in letters]
    assert pieces == ["a", "", "é", "", "", "✓"]
    assert text.push([0xE2]) == "" and text.flush() == "\N{REPLACEMENT CHARACTER}"
    assert find_stop("abcab", 2, ["ca"]) == 2


def test_submitted_requests_run_beside_a_blocking_call(engine):
    first = engine.add_request([5, 6, 7], GREEDY)
    between = engine.generate([[8, 9]], GREEDY)
    done = {}
    for _ in range(50):
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    assert list(done) == [first]
    assert done[first].token_ids == engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert between[0].error is None


def test_a_full_queue_refuses_and_a_blocking_call_feeds_it_slowly(tiny):
    engine = Engine(tiny("llama"), page_size=16, max_num_seqs=1, max_waiting=2)
    numbers = [engine.add_request([5, 6, i + 7], GREEDY) for i in range(4)]
    done = {}
    while len(done) < 4:
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    assert [bool(done[n].error) for n in numbers] == [False, False, True, True]
    assert "queue is full" in done[numbers[3]].error
    assert all(c.error is None for c in engine.generate([[5, 6, i] for i in range(7, 20)], GREEDY))


def test_messages_go_through_the_chat_template(engine):
    chat = [{"role": "user", "content": "hello"}]
    assert engine.generate([chat], GREEDY) == engine.generate(["hello"], GREEDY)


def test_an_exhausted_deadline_returns_what_there_is(engine):
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    done = engine.generate([[5, 6]] * 3, long, deadline=0.05)
    assert len(done) == 3 and all(c.finish_reason == "deadline" for c in done)


def test_stats_and_traces_tell_what_happened(tiny, tmp_path):
    engine = Engine(
        tiny("llama"), page_size=16, memory=4 * 16 * 2 * 2 * 2 * 8 * 4, max_num_batched_tokens=64
    )
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.generate([[5 + i] * 14 for i in range(4)], long)
    s = engine.stats.summary()
    assert s["new_tokens"] == 120 and s["finished_length"] == 4 and s["preemptions"] > 0
    assert 0 < s["occupancy"] <= 1 and 0 < s["kv_cache_usage"] <= 1
    assert s["ttft_p99"] >= s["ttft_p50"] > 0 and s["itl_p50"] > 0
    engine.trace.write_jsonl(tmp_path / "trace.jsonl")
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds.count("queued") == kinds.count("admitted") == kinds.count("finished") == 4
    assert kinds.count("preempted") == kinds.count("resumed") == s["preemptions"]
    assert all("by" in e and "why" in e for e in events if e["event"] == "preempted")
    engine.trace.write_chrome(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all(span["dur"] >= 0 for span in spans) and len(spans) >= 12
    engine.stats.plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_logs_hold_no_prompt_and_no_text(tiny, caplog, capfd, tmp_path):
    secret = "xyzzy-secret"
    with caplog.at_level(logging.DEBUG, logger="nopad"):
        engine = Engine(tiny("llama"), Letters(), page_size=16, debug=True)
        done = engine.generate([secret], SamplingParams(temperature=0, max_tokens=4))
    engine.trace.write_jsonl(tmp_path / "trace.jsonl")
    said = caplog.text + "".join(capfd.readouterr()) + (tmp_path / "trace.jsonl").read_text()
    assert secret not in said and str(done[0].token_ids) not in said
    assert done[0].text not in said or not done[0].text.strip()


CORRUPTIONS = {
    "two slots swapped": lambda s: s.slots.__setitem__(slice(0, 2), s.slots[[1, 0]]),
    "a slot one off": lambda s: s.slots.__setitem__(0, s.slots[0] + 1),
    "all slots one off": lambda s: s.slots.__iadd__(1),
    "a negative slot": lambda s: s.slots.__setitem__(0, -1),
    "a position one off": lambda s: s.positions.__setitem__(-1, s.positions[-1] + 1),
    "positions from zero": lambda s: s.positions.__isub__(1),
    "another's page": lambda s: s.table.__setitem__((0, 0), s.table[-1, 0]),
    "pages swapped": lambda s: s.table.__setitem__((0, slice(0, 2)), s.table[0, [1, 0]]),
    "a wrong token": lambda s: s.ids.__setitem__(0, s.ids[0] + 1),
    "a page never written": lambda s: s.table.__setitem__((0, 0), 7),
}


@pytest.mark.parametrize("fault", CORRUPTIONS)
def test_the_canary_sees_every_corruption(tiny, fault, monkeypatch):
    """B8: ten deliberate corruptions of a step's arrays; without them it never complains."""
    from nopad.inference.scheduling import loop

    memory = 8 * 16 * 2 * 2 * 2 * 8 * 4
    prompts = [list(range(3, 23)), list(range(40, 62))]
    Engine(tiny("llama"), page_size=16, memory=memory, debug=True).generate(prompts, GREEDY)
    engine = Engine(tiny("llama"), page_size=16, memory=memory, debug=True)
    real = loop.build

    def corrupt(*args):
        step = real(*args)
        CORRUPTIONS[fault](step)
        return step

    monkeypatch.setattr(loop, "build", corrupt)
    with pytest.raises(AssertionError, match="slot"):
        engine.generate(prompts, GREEDY)


def test_keys_of_other_weights_are_seen_by_the_canary(tiny):
    engine = Engine(tiny("llama"), page_size=16, debug=True)
    prompt = list(range(3, 43))
    engine.generate([prompt], GREEDY)
    scheduler = engine._machine.loop.scheduler
    scheduler.pages.attach_prefix("thief", prompt, scheduler.scope)  # stays cached under the old version
    scheduler.pages.free("thief")
    real = scheduler.pages.attach_prefix
    scheduler.pages.attach_prefix = lambda owner, tokens, scope: real(owner, tokens, "1")
    scheduler.scope = "changed"
    with pytest.raises(AssertionError, match="does not hold its token"):
        engine.generate([prompt], GREEDY)


def test_settings_that_cannot_be_meant_raise(tiny):
    model = tiny("llama")
    for bad in ({"memory": -1}, {"memory": "all"}, {"memory": 10}, {"page_size": 20}):
        with pytest.raises(ValueError, match=r"memory|page"):
            Engine(model, **bad).generate([[3]], GREEDY)
    for bad in ({"max_num_seqs": -2}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 1.5}):
        with pytest.raises(ValueError, match="whole number"):
            Engine(model, **bad)
    with pytest.raises(ValueError, match="list of prompts"):
        Engine(model).generate("one string", GREEDY)
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        Engine(model).generate([[3]], [GREEDY, GREEDY])


def test_thousands_of_requests_come_back_in_order(tiny):
    engine = Engine(tiny("llama"), page_size=16)
    prompts = [[3 + i % 90] for i in range(2000)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    out = engine.generate(prompts, one)
    table = {p[0]: c.token_ids for p, c in zip(prompts[:90], out, strict=False)}
    assert [c.token_ids for c in out] == [table[p[0]] for p in prompts]
    assert np.mean([len(c.token_ids) for c in out]) == 1


def test_every_argument_of_the_engine_is_explained():
    explained = re.findall(r"^(\w+): ", inspect.getdoc(Engine) or "", re.M)
    assert explained == list(inspect.signature(Engine).parameters)[2:]


def test_requests_submitted_one_after_the_other_look_at_the_weights_once(tiny, monkeypatch):
    engine = Engine(tiny("llama"))
    engine.add_request([5, 6, 7], GREEDY)
    looked, weights = [], engine._tenancy._weights
    plain = weights._sample
    monkeypatch.setattr(weights, "_sample", lambda: looked.append(1) or plain())
    engine.add_request([8, 9], GREEDY)
    assert not looked
    engine.step()
    engine.add_request([10, 11], GREEDY)
    engine.add_request([12], GREEDY)
    assert len(looked) == 1
    while engine._loop.busy:
        engine.step()
    engine.add_request([13], GREEDY)
    assert len(looked) == 2


def test_a_running_engine_answers_no_new_request_from_the_cache_of_old_weights(tiny):
    """Writes through `.data` move no version counter."""
    model = tiny("llama")
    engine = Engine(model, page_size=16)
    prompt = list(range(3, 52))
    engine.add_request(prompt, GREEDY)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(10):
        engine.step()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.flip(0))
    again, got = engine.add_request(prompt, GREEDY), None
    while got is None:
        done = (e.completion for e in engine.step() if e.request_id == again)
        got = next((c for c in done if c is not None), None)
    (want,) = Engine(model, page_size=16).generate([prompt], GREEDY)
    assert got.token_ids == want.token_ids
