"""Models with recurrent or convolutional states: the engine gives what `generate` gives alone."""

from __future__ import annotations

import copy
import logging
from functools import wraps

import numpy as np
import pytest
import torch
from nopad.attention import PagedCache, layer_shapes
from nopad.attention.hf import stateful_parts
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.inference import Engine, SamplingParams, batch_invariant
from nopad.trainer.loss import attach_loss
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAST = ["bamba", "lfm2"]
SLOW = [
    "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "zaya",
]  # fmt: skip
SLOW = [kind for kind in SLOW if kind in CONFIG_MAPPING]  # an older Transformers has fewer
CLAMPED = {"nemotron_h"}
"""Types whose own code bounds the time step of chunks, and not that of one token.

They continue a prompt token by token, and recompute the tokens of a preempted request in a chunk.
"""
SLOWLY = pytest.mark.slow
KINDS = [*FAST, *(pytest.param(kind, marks=SLOWLY) for kind in SLOW)]
RECOMPUTED = [*FAST, *(pytest.param(k, marks=SLOWLY) for k in SLOW if k not in CLAMPED)]
WEAK_STATES = ["mamba", *(pytest.param(k, marks=SLOWLY) for k in (*FAST, *SLOW) if k != "mamba")]
NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
SCORED = SamplingParams(max_tokens=NEW, seed=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PROMPTS = [
    [(7 * i + 5 * length) % 90 + 5 for i in range(length)] for length in (1, 7, 19, 34, 5, 12)
]
_models: dict = {}
_alone: dict = {}


def tiny(kind):
    """A tiny model of a type, the same object every time."""
    if kind not in _models:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind]()
        model, _ = tiny_model(config, every_kind=True, attn_implementation="eager")
        randomize_weights(model)
        _models[kind] = model.eval()
    return _models[kind]


def alone(model, prompt, new=NEW):
    """Tokens and log-probabilities of a request that `generate` runs alone."""
    key = id(model), tuple(prompt), new
    if key not in _alone:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, use_cache=True,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = torch.stack(out.logits, 1)[0].float().log_softmax(-1)
        # With the model, which must live as long as its id is a key.
        _alone[key] = model, tokens, logprobs[range(len(tokens)), tokens].tolist()
    return _alone[key][1:]


def assert_is_generate(model, completions, prompts=PROMPTS):
    for completion, prompt in zip(completions, prompts, strict=True):
        tokens, logprobs = alone(model, prompt)
        assert completion.error is None and completion.token_ids == tokens
        np.testing.assert_allclose([x.logprob for x in completion.logprobs], logprobs, atol=1e-4)


def state_bytes(model) -> int:
    return sum(each.bytes for each in stateful_parts(model).values())


def chunk_size(kind, size) -> int:
    """Tokens of a step: all of a prompt for the types whose chunks are not their prompts."""
    return 64 if kind in CLAMPED else size


def page_bytes(model) -> int:
    return PagedCache.bytes_per_page(layer_shapes(model), 16, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_those_of_generate(kind):
    model = tiny(kind)
    assert_is_generate(model, Engine(model, debug=True).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_prompt_continue_its_state_in_rows_used_before(kind):
    model = tiny(kind)
    size = chunk_size(kind, 6)
    engine = Engine(model, max_num_batched_tokens=size, max_num_seqs=2, debug=True)
    assert_is_generate(model, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("kind", WEAK_STATES)
@pytest.mark.parametrize("size", [5, *(pytest.param(n, marks=SLOWLY) for n in (2, 3, 4, 16, 17))])
def test_chunks_continue_a_state_that_hardly_matters(kind, size):
    """The initial weights of Mamba hide a lost state from every check that has a tolerance."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny(kind).config)
    model = type(tiny(kind))._from_config(config, attn_implementation="eager").float().eval()
    engine = Engine(model, max_num_batched_tokens=size, max_num_seqs=min(size, 3), debug=True)
    ids, done = [], {}
    for prompt in PROMPTS[1:5]:  # each joins while others run
        ids.append(engine.add_request(prompt, SCORED))
        done |= {e.request_id: e.completion for e in engine.step() if e.completion is not None}
    while len(done) < len(ids):
        done |= {e.request_id: e.completion for e in engine.step() if e.completion is not None}
    for each, prompt in zip(ids, PROMPTS[1:5], strict=True):
        tokens = [*prompt, *done[each].token_ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)
        expected = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
        found = [*(done[each].prompt_logprobs or [])[1:], *done[each].logprobs]
        np.testing.assert_allclose([x.logprob for x in found], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_preempted_request_is_computed_again(kind):
    model = tiny(kind)
    engine = Engine(model, page_size=16, max_num_seqs=3, max_model_len=64)
    occupy(engine, leave=4)
    assert_is_generate(model, engine.generate(PROMPTS, GREEDY))
    assert engine.stats.preemptions


def occupy(engine, leave):
    """Hold all pages of an engine but a few."""
    engine.generate([[5]], SamplingParams(max_tokens=1))
    pages = engine._session.executor.loop.scheduler.pages
    pages.allocate("others", pages.num_pages - leave)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_plain_forward(kind):
    model = tiny(kind)
    contexts, ends = PROMPTS[2:4], [[[9, 8, 7], [5]], [[11, 12, 13, 14, 15]]]
    engine = Engine(model, max_num_batched_tokens=chunk_size(kind, 13))
    for context, several, scores in zip(contexts, ends, engine.score(contexts, ends), strict=True):
        for end, score in zip(several, scores, strict=True):
            ids = torch.tensor([context + end])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            positions = range(len(context) - 1, ids.shape[1] - 1)
            expected = [float(logits[i, ids[0, i + 1]]) for i in positions]
            np.testing.assert_allclose(score.token_logprobs, expected, atol=1e-4)


def test_samples_of_a_prompt_depend_on_their_seed_alone():
    model = tiny("bamba")
    params = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=NEW, ignore_eos=True)
    (done,) = Engine(model).generate([PROMPTS[2]], params)
    busy = Engine(model, max_num_batched_tokens=7, max_num_seqs=3, debug=True)
    *_, among = busy.generate([*PROMPTS, PROMPTS[2]], [*[GREEDY] * len(PROMPTS), params])
    samples = [each.token_ids for each in (done, *done.others)]
    assert samples == [each.token_ids for each in (among, *among.others)]
    assert len(samples) == 2 and samples[0] != samples[1]


def test_stop_tokens_and_aborts_leave_the_others_alone():
    model = tiny("lfm2")
    tokens, _ = alone(model, PROMPTS[3])
    engine = Engine(model, max_num_seqs=2, max_num_batched_tokens=9, debug=True)
    stop = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, stop_token_ids=[tokens[3]]
    )
    (stopped,) = engine.generate([PROMPTS[3]], stop)
    assert stopped.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine.abort(ids[0])
    engine.abort(ids[2])
    done = {}
    while len(done) < len(ids):
        done |= {e.request_id: e.completion for e in engine.step() if e.completion is not None}
    kept = [i for i in range(len(ids)) if done[ids[i]].finish_reason == "length"]
    assert len(kept) >= 4
    assert_is_generate(model, [done[ids[i]] for i in kept], [PROMPTS[i] for i in kept])


@pytest.mark.parametrize("kind", ["bamba", pytest.param("jamba", marks=SLOWLY)])
def test_a_poisoned_request_harms_nobody(kind):
    model = fresh(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    engine = Engine(model, max_num_seqs=2, max_num_batched_tokens=9, debug=True)
    prompts = [[3, 5], *PROMPTS, [7, 3]]
    first, *others, last = engine.generate(prompts, GREEDY)
    assert "not numbers" in first.error and "not numbers" in last.error
    assert_is_generate(tiny(kind), others)


def test_a_step_that_runs_out_of_memory_midway_is_recomputed(monkeypatch):
    model = tiny("lfm2")
    calls, head = [], model.get_output_embeddings()

    def fail_once(*_):
        calls.append(None)
        if len(calls) in (2, 5):
            raise torch.OutOfMemoryError("no memory for the logits")

    engine = Engine(model)
    engine.generate([[5]], SamplingParams(max_tokens=1))
    handle = head.register_forward_pre_hook(fail_once)
    try:
        completions = engine.generate(PROMPTS, GREEDY)
    finally:
        handle.remove()
    assert len(calls) > 5
    assert_is_generate(model, completions)


def fresh(kind):
    """A model like `tiny(kind)` that may be changed."""
    model, _ = tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="eager")
    model.load_state_dict(tiny(kind).state_dict())
    return model


def train(kind, evaluate):
    """Weights after a few steps on packs, with or without generation between them."""
    model = fresh(kind).train()
    model.set_attn_implementation("nopad")
    attach_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = Engine(model, max_num_batched_tokens=chunk_size(kind, 9), max_num_seqs=2)
    evaluations = []
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {"max_length_q": 7, "max_length_k": 7, "use_cache": False}
    ids = torch.arange(5, 17)[None]
    for _ in range(3):
        loss = model(
            input_ids=ids, labels=ids, position_ids=torch.tensor([[*range(5), *range(7)]]),
            cu_seq_lens_q=ends, cu_seq_lens_k=ends, **lengths,
        ).loss  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            evaluations.append(engine.generate(PROMPTS[:4], GREEDY))
            assert model.training
    return model, evaluations


@pytest.mark.parametrize("kind", ["lfm2", *KINDS[len(FAST) :]])
def test_generation_between_steps_follows_the_weights_and_leaves_no_trace(kind):
    model, evaluations = train(kind, evaluate=True)
    undisturbed, _ = train(kind, evaluate=False)
    expected = undisturbed.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model.nopad_loss.detach()
    model.set_attn_implementation("eager")
    assert_is_generate(model.eval(), evaluations[-1], PROMPTS[:4])
    assert evaluations[0] != evaluations[-1]


def test_states_take_at_most_half_of_the_memory_and_prefixes_are_not_cached(caplog):
    model = tiny("bamba")
    states = state_bytes(model)
    engine = Engine(model, memory=4 * states + 100 * page_bytes(model), max_num_seqs=16)
    short = Engine(model, memory=int(7.9 * states), max_num_seqs=16, page_size=16)
    with caplog.at_level(logging.INFO, "nopad.inference"):
        assert_is_generate(model, short.generate(PROMPTS[:2], GREEDY), PROMPTS[:2])
        assert_is_generate(model, short.generate(PROMPTS[:2], GREEDY), PROMPTS[:2])
    assert caplog.text.count("without prefix caching") == 1 and "3 requests run" in caplog.text
    assert short.max_num_seqs == 3 and short.stats.prefix_hit_tokens == 0
    assert short._session.executor.runner.cache.num_pages <= 4 * states // page_bytes(model)
    short.max_num_seqs = 16
    assert_is_generate(model, short.generate(PROMPTS, GREEDY))
    assert engine.max_num_seqs == 16
    with pytest.raises(ValueError, match="the states of one request take"):
        Engine(model, memory=states).generate([[5]])


def test_batch_invariance_is_refused():
    with batch_invariant(64), pytest.raises(ValueError, match="its layers keep a state"):
        Engine(tiny("lfm2")).generate([[5, 6, 7]], GREEDY)


@pytest.mark.parametrize(
    ("kind", "name", "states", "kept"),
    [
        ("lfm2", "Lfm2ShortConv", "conv_states", 0.0),
        ("lfm2", "Lfm2ShortConv", "conv_states", 0.7),
        ("zaya", "ZayaCCAProjection", "recurrent_states", 0.0),  # in its third output alone
    ],
)
def test_a_module_that_loses_its_state_is_refused(kind, name, states, kept, monkeypatch):
    model = fresh(kind)
    module = next(type(each) for each in model.modules() if type(each).__name__ == name)
    stock = module.forward

    @wraps(stock)  # its parameters are read
    def forgetful(self, hidden_states, past_key_values=None, *args, **kwargs):
        if past_key_values is not None and past_key_values.has_previous_state(self.layer_idx):
            getattr(past_key_values.layers[self.layer_idx], states)[0] *= kept
        return stock(self, hidden_states, past_key_values, *args, **kwargs)

    monkeypatch.setattr(module, "forward", forgetful)
    with pytest.raises(ValueError, match=rf"second chunk of a prompt .*\({name}\)"):
        Engine(model).generate([[5, 6, 7]], GREEDY)


def test_many_types_are_held_to_it():
    assert len({*FAST, *SLOW}) >= 18
