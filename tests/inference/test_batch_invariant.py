"""In batch-invariant mode a request's tokens and their log-probabilities are bitwise its own.

Whatever the schedule: who else runs, in which order they come, how prompts are cut into chunks, how
pages are sized, and who is preempted for lack of them (B4).
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import replace
from threading import Thread

import pytest
import torch
from nopad.attention.backends import CallSpec, selection
from nopad.inference import Engine, SamplingParams, batch_invariant
from nopad.inference.batch_invariant import _attention_blockwise
from nopad.inference.fused.stacked_weights import stacked_bytes

module = importlib.import_module("nopad.inference.batch_invariant")  # the function has its name

LONGEST = 64
SPEC = CallSpec("cpu", torch.float32, 4, 2, 64, 64, False, False, False, False, 16, False)
PARTS = [(0, 3), *(pytest.param(part, 25, marks=pytest.mark.slow) for part in range(8))]
"""Seeds and numbers of schedules: parts run side by side."""


def asked(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Requests that share beginnings, greedy and sampled."""
    stems = [[rng.randrange(3, 90) for _ in range(20)] for _ in range(2)]
    made = []
    for number in range(6):
        prompt = rng.choice(stems)[: rng.randint(0, 20)]
        prompt = prompt + [rng.randrange(3, 90) for _ in range(rng.randint(1, 12))]
        heat = rng.choice([0.0, 0.8])
        new = rng.randint(4, 24)
        made.append(
            (prompt, SamplingParams(temperature=heat, max_tokens=new, seed=number, logprobs=2,
                                    ignore_eos=True))
        )  # fmt: skip
    return made


def answers(engine: Engine, requests: list) -> list:
    out = engine.generate([p for p, _ in requests], [q for _, q in requests])
    assert all(c.error is None for c in out)
    return [(c.token_ids, [(t.logprob, t.top_logprobs) for t in c.logprobs or ()]) for c in out]


def check_schedules(model, seed: int, count: int) -> None:
    rng, preempted, drafted = random.Random(seed), 0, 0
    whole = Engine(model, max_model_len=LONGEST, page_size=16)
    answers(whole, [([5], SamplingParams(max_tokens=1))])
    page = whole._executor.runner.cache.page_bytes
    # On a GPU an engine sets memory aside for copies of weights, wanted here or not.
    aside = stacked_bytes(model, model.dtype.itemsize) if model.device.type == "cuda" else 0
    with batch_invariant(LONGEST):
        requests = asked(rng)
        alone = [answers(Engine(model, max_model_len=LONGEST), [r])[0] for r in requests]
        for number in range(count):
            engine = Engine(
                model,
                max_model_len=LONGEST,
                memory=aside + page * rng.choice([5, 100]),
                cuda_graphs=False,
                page_size=rng.choice([16, 32]),
                max_num_seqs=rng.randint(1, 6),
                max_num_batched_tokens=rng.choice([1, 3, 7, 20, 200]),
                speculate=rng.choice([None, "ngram", "history"]),
            )
            for _ in range(2):  # the second time, the first completions are drafts
                order = rng.sample(range(len(requests)), rng.randint(1, len(requests)))
                got = answers(engine, [requests[i] for i in order])
                assert got == [alone[i] for i in order], f"schedule {number}"
            preempted += engine.stats.preemptions
            drafted += engine.stats.drafted_tokens
    assert preempted, "no schedule was short of pages"
    assert drafted, "no schedule had drafts"


@pytest.mark.parametrize(("seed", "count"), PARTS)
def test_every_schedule_gives_the_same_bits_in_fp32(always, tiny, seed, count):
    check_schedules(tiny("llama"), seed, count)


def experts():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}
    return OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, initializer_range=0.3)).eval()


@pytest.mark.parametrize("family", ["gpt2", "experts"])
def test_layers_that_are_no_linear_give_the_same_bits(tiny, family):
    model = experts() if family == "experts" else tiny(family)
    requests = [(p, replace(q, max_tokens=4)) for p, q in asked(random.Random(0))]
    together = answers(Engine(model), requests)
    with batch_invariant(LONGEST):
        alone = [answers(Engine(model), [request])[0] for request in requests]
        assert answers(Engine(model), requests) == alone != together


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_products_that_depend_on_the_batch_are_refused(tiny, family):
    with batch_invariant(LONGEST), pytest.raises(ValueError, match="it calls matmul, as attention"):
        Engine(tiny(family)).generate([[5, 6, 7]], SamplingParams(max_tokens=2))


@pytest.mark.gpu
@pytest.mark.parametrize(("seed", "count"), PARTS)
def test_every_schedule_gives_the_same_bits_in_bf16_on_a_gpu(always, tiny, seed, count):
    check_schedules(tiny("llama").to("cuda", torch.bfloat16), seed, count)


def test_without_the_mode_company_shows_in_the_last_bits(tiny):
    """Else the tests above would prove nothing."""
    model, requests = tiny("llama"), asked(random.Random(0))
    alone = [answers(Engine(model), [r])[0] for r in requests]
    assert answers(Engine(model), requests) != alone


def test_a_page_may_be_longer_than_the_longest_sequence(tiny):
    """As pages are on a GPU, where every engine in this mode was once refused for it."""
    model, requests = tiny("llama"), asked(random.Random(0))
    with batch_invariant(LONGEST):
        want, got = (
            answers(Engine(model, max_model_len=LONGEST, page_size=size), requests)
            for size in (16, 256)
        )
    assert got == want


def test_what_a_gpu_computes_in_blocks_is_what_it_stands_in_for():
    torch.manual_seed(0)
    for queries in (1, 5, 70):
        q, k, v = (torch.randn(3, 4, n, 8) for n in (queries, 11, 11))
        bias = torch.randn(3, 1, 1, 11)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)
        torch.testing.assert_close(_attention_blockwise(q, k, v, bias, 0.3), want)


def makes_trials() -> bool:
    """Whether a backend is tried before it is used: then an unknown one is refused."""
    try:
        return selection.select_backend(SPEC, "unknown") != "unknown"
    except ValueError:
        return True


def test_the_mode_leaves_nothing_behind():
    before = dict(vars(torch.Tensor)), dict(vars(torch.nn.functional)), dict(os.environ)
    with batch_invariant(LONGEST):
        assert before == (dict(vars(torch.Tensor)), dict(vars(torch.nn.functional)), os.environ)
        x = torch.randn(3, 5)
        assert x.mean(-1, keepdim=True).shape == (3, 1) and x.mean().ndim == 0
        assert selection.select_backend(SPEC) == "sdpa" and not makes_trials()
    assert selection.forced_paged_backend() is None and makes_trials()


@pytest.mark.parametrize(
    ("call", "replacement"),
    [
        (lambda x: torch.nn.functional.linear(x, x), "_linear"),
        (lambda x: torch.nn.Linear(4, 4)(x), "_linear"),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), "_attention"),
        (lambda x: x.mean(-1, keepdim=True), "_rowwise"),
        (lambda x: x.logsumexp(-1), "_rowwise"),
    ],
    ids=["linear", "nn.Linear", "sdpa", "mean", "logsumexp"],
)
def test_the_four_torch_functions_are_replaced_inside_and_only_there(
    call, replacement, monkeypatch
):
    calls, original = [], getattr(module, replacement)
    monkeypatch.setattr(module, replacement, lambda *a, **k: calls.append(1) or original(*a, **k))
    x = torch.ones(4, 4)[None, None] if replacement == "_attention" else torch.ones(4, 4)
    with batch_invariant(LONGEST):
        call(x)
    assert calls == [1]
    call(x)
    assert calls == [1]


def test_other_threads_compute_as_ever():
    chosen = []
    with batch_invariant(LONGEST):
        other = Thread(target=lambda: chosen.append(makes_trials()))
        other.start()
        other.join()
    assert chosen == [True]
