"""The engine's contract: one completion per request, isolated faults, nothing private in logs."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import random
import re

import numpy as np
import pytest
import torch
from fake_tokenizer import FakeTokenizer
from nopad.inference import DataParallelEngine, Engine, SamplingParams
from nopad.inference.live_model import weights_version
from nopad.inference.requests.detokenizer import Detokenizer, find_stop
from nopad.inference.scheduling.cache_checker import check_scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TOKENIZER = FakeTokenizer(
    eos_token_id=0,
    bos_token_id=1,
    add_bos=True,
    encoding="utf-8",
    hidden=3,
    to_token=lambda byte: 3 + byte % 94,
    to_byte=lambda token: (token - 3) % 94 + 32,
)


@pytest.fixture
def engine(tiny):
    return Engine(tiny("llama"), TOKENIZER, page_size=16)


BAD_REQUESTS = {
    "empty": ([], "empty"),
    "too long": (list(range(3, 90)) * 4, "max_model_len is 256"),
    "beyond the vocabulary": ([3, 97], "97 is not in the vocabulary of 97: is the tok"),
    "negative id": ([3, -1], "-1 is not in the vocabulary"),
}
BAD_CALLS = {
    "not ids": ([0.5, 1.5], GREEDY, r"^prompt 1: .* flat list of ids"),
    "nested": ([[3, 4]], GREEDY, "flat list of ids"),
    "nothing": (None, GREEDY, "prompt is a NoneType"),
    "negative temperature": ([3], {"temperature": -1}, "temperature is -1"),
    "unknown parameter": ([3], {"heat": 1}, "heat"),
    "empty stop string": ([3], {"stop": ""}, "at least one character"),
    "stop of nothing": ([3], {"stop": [""]}, "at least one character"),
    "bias off the vocabulary": ([3], {"logit_bias": {500: 1.0}}, "500 is not in the vocabulary"),
    "more than the most": ([3], {"max_tokens": 2, "min_tokens": 3}, "lower the one or raise"),
    "no tokens wanted": ([3], {"max_tokens": 0}, "max_tokens is 0"),
    "not a number": ([3], {"temperature": float("nan")}, "temperature is nan"),
    "no end": ([3], {"stop_token_ids": range(97), "min_tokens": 2}, "every token ends the text"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_says_why_and_the_others_are_unharmed(engine, case):
    prompt, message = BAD_REQUESTS[case]
    good = [[5, 6, 7], [8, 9]]
    out = engine.generate([good[0], prompt, good[1]], GREEDY)
    alone = [c.token_ids for c in engine.generate(good, GREEDY)]
    assert [out[0].token_ids, out[2].token_ids] == alone
    assert out[1].finish_reason == "error" and message in out[1].error
    assert out[1].token_ids == []


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_fault_of_the_call_raises_at_once_and_harms_no_active_request(engine, case):
    prompt, params, message = BAD_CALLS[case]
    (want,) = engine.generate([[5, 6, 7]], GREEDY)
    active = engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    steps = engine.stats.summary()["steps"]
    for call in (engine.generate, engine.stream, DataParallelEngine(engine).generate):
        with pytest.raises(ValueError, match=message):
            call([[8, 9], prompt], [GREEDY, params])
    with pytest.raises(ValueError, match=message.replace("prompt 1", "prompt 0")):
        engine.add_request(prompt, params)
    assert engine.stats.summary()["steps"] == steps, "nothing has run"
    events = [event for _ in range(9) for event in engine.step()]
    assert [e.completion for e in events if e.completion] == [want]
    assert [e.request_id for e in events if e.completion] == [active]


def test_text_without_a_tokenizer_raises_at_once(tiny):
    engine = Engine(tiny("llama"))
    chat = [{"role": "user", "content": "hello"}]
    for prompt in ("hello", chat):
        with pytest.raises(ValueError, match=r"needs a tokenizer: Engine\(model, tokenizer\)"):
            engine.generate([[3, 4], prompt], GREEDY)
        with pytest.raises(ValueError, match="needs a tokenizer"):
            engine.score([prompt], [[5]])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.score_rolling(["hello"])
    with pytest.raises(ValueError, match="stop strings needs a tokenizer"):
        engine.generate([[3, 4]], {"stop": ["x"]})
    with pytest.raises(ValueError, match="heat"):
        engine.generate([], {"heat": 1})


@pytest.mark.parametrize("mixes", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_poisonous_request_harms_itself_only(mixes, tiny, monkeypatch):
    """B6: bad ids, empty prompts, bad settings and NaN logits, in random mixes."""
    model = tiny("llama")
    engine = Engine(model, page_size=16)
    poison = 96  # a request that contains it gets logits that are not numbers
    kinds = {"good": [5, 6], "nan": [5, poison], "id": [5, 400], "empty": [], "long": [5] * 300}
    want = engine.generate([[5, 6]], GREEDY)[0].token_ids
    runner = engine._executor.runner
    real = runner._forward

    def poisoned(step):
        logits = real(step)
        bad = [r for r, q in enumerate(step.sampled_requests) if poison in q.prompt_token_ids]
        return logits.index_fill(0, torch.tensor(bad, dtype=torch.int64), torch.nan)

    monkeypatch.setattr(runner, "_forward", poisoned)
    rng = random.Random(0)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in range(mixes):
        names = [rng.choice(list(kinds)) for _ in range(rng.randint(1, 4))]
        out = engine.generate([kinds[name] for name in names], short)
        assert len(out) == len(names)
        for name, completion in zip(names, out, strict=True):
            if name == "good":
                assert completion.token_ids == want[:2] and completion.error is None
            else:
                assert completion.finish_reason == "error" and completion.error
    check_scheduler(engine._executor.loop.scheduler)


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

    monkeypatch.setattr(engine._executor.runner, where, fault)
    with pytest.raises(RuntimeError, match="seeded fault"):
        engine.generate([prompt, [*prompt, 4]], GREEDY)
    assert engine.generate([prompt], GREEDY)[0].token_ids == want


def test_a_name_is_not_a_tokenizer_of_a_model(tiny, tmp_path):
    for name in ("gpt2", tmp_path):
        with pytest.raises(ValueError, match="is a name: pass AutoTokenizer"):
            Engine(tiny("llama"), tokenizer=name)


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
    assert not engine._executor.loop.busy
    check_scheduler(engine._executor.loop.scheduler)


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


def test_prompts_run_in_the_steps_that_the_longest_answer_needs(tiny):
    engine = Engine(tiny("llama"), page_size=16, max_num_batched_tokens=32)
    prompts = [[5 + i, *range(5, 34)] for i in range(8)] + [[5, 6, 7]]
    limits = [2] * 8 + [12]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in limits]
    done = engine.generate(prompts, params)
    assert [len(c.token_ids) for c in done] == limits
    # A step per token of the longest answer, though the prompts alone fill eight; the loop runs
    # one step ahead. In the order of their lengths there would be 19.
    assert engine.stats.steps <= 12 + 1


def test_messages_go_through_the_chat_template(engine):
    chat = [{"role": "user", "content": "hello"}]
    assert engine.generate([chat], GREEDY) == engine.generate(["hello"], GREEDY)


def test_messages_with_images_are_refused(engine):
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "hello"}]
    refused, plain = engine.generate([[{"role": "user", "content": parts}], "hello"], GREEDY)
    assert refused.error == "the engine generates from text: images are for training"
    assert plain.error is None


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
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_logs_hold_no_prompt_and_no_text(tiny, caplog, capfd, tmp_path):
    secret = "xyzzy-secret"
    with caplog.at_level(logging.DEBUG, logger="nopad"):
        engine = Engine(tiny("llama"), TOKENIZER, page_size=16, debug=True)
        done = engine.generate([secret], SamplingParams(temperature=0, max_tokens=4))
    engine.trace.write_jsonl(tmp_path / "trace.jsonl")
    logged = caplog.text + "".join(capfd.readouterr()) + (tmp_path / "trace.jsonl").read_text()
    assert secret not in logged and str(done[0].token_ids) not in logged
    assert done[0].text not in logged or not done[0].text.strip()


def test_settings_that_cannot_be_meant_raise(tiny):
    model = tiny("llama")
    for bad in ({"memory": -1}, {"memory": "all"}, {"memory": 10}, {"page_size": 20}):
        with pytest.raises(ValueError, match=r"memory|page"):
            Engine(model, **bad).generate([[3]], GREEDY)
    for bad in ({"max_num_seqs": -2}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 1.5}):
        with pytest.raises(ValueError, match="must be an integer"):
            Engine(model, **bad)
    with pytest.raises(ValueError, match="list of prompts"):
        Engine(model).generate("one string", GREEDY)
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        Engine(model).generate([[3]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="progress is 5; pass True, False or a function"):
        Engine(model).generate([[3]], GREEDY, progress=5)


def test_thousands_of_requests_come_back_in_order(tiny):
    engine = Engine(tiny("llama"), page_size=16)
    prompts = [[3 + i % 90] for i in range(2000)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    out = engine.generate(prompts, one)
    table = {p[0]: c.token_ids for p, c in zip(prompts[:90], out, strict=False)}
    assert [c.token_ids for c in out] == [table[p[0]] for p in prompts]
    assert np.mean([len(c.token_ids) for c in out]) == 1


def test_every_argument_of_the_engine_is_explained():
    explained = re.findall(r"^    (\w+): ", inspect.getdoc(Engine) or "", re.M)
    assert explained == list(inspect.signature(Engine).parameters)


def test_values_of_weights_are_read_once_until_the_engine_is_idle(tiny, monkeypatch):
    engine = Engine(tiny("llama"))
    engine.add_request([5, 6, 7], GREEDY)
    samples, plain = [], weights_version.sample_checksum
    monkeypatch.setattr(
        weights_version, "sample_checksum", lambda tensors: samples.append(1) or plain(tensors)
    )
    engine.add_request([8, 9], GREEDY)
    assert not samples
    engine.step()
    engine.add_request([10, 11], GREEDY)
    assert not samples  # a busy engine looks at the counters
    while engine._loop.busy:
        engine.step()
    engine.add_request([13], GREEDY)
    assert len(samples) == 1


def test_a_running_engine_reads_no_cache_of_old_weights(tiny):
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, page_size=16)
    prompt = list(range(3, 52))
    engine.add_request(prompt, GREEDY)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(10):
        engine.step()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(parameter.flip(0))
    again, got = engine.add_request(prompt, GREEDY), None
    while got is None:
        done = (e.completion for e in engine.step() if e.request_id == again)
        got = next((c for c in done if c is not None), None)
    (want,) = Engine(model, page_size=16).generate([prompt], GREEDY)
    assert got.token_ids == want.token_ids
