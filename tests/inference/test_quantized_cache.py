"""`Engine(kv_dtype=)`: completions of a model whose keys and values are rounded to 8 bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from nopad.attention import PagedCache, layer_shapes
from nopad.attention.hf import interface
from nopad.attention.paging.quantized import dequantize, quantize
from nopad.inference import Engine, SamplingParams, settings

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHARED = list(range(3, 40))
PROMPTS = [[*SHARED, 50, 51], [*SHARED, 60], [7, 8, 9], [*SHARED, 50, 51, 52]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)


@pytest.fixture
def rounded_alone(monkeypatch):
    """Return tokens and log-probabilities of one sequence at a time, without pages, in fp32."""
    right = interface.attend

    def run(model, kv_dtype, prompt, count):
        def attend(q, k, v, varlen, **options):
            k, v = (dequantize(*quantize(x, DTYPES[kv_dtype]), x.dtype) for x in (k, v))
            return right(q, k, v, varlen, **options)

        ids, logprobs = list(prompt), []
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(interface, "attend", attend)
            model.set_attn_implementation("nopad")
            for _ in range(count):
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.argmax()))
                logprobs.append(float(logits.log_softmax(-1).max()))
        model.set_attn_implementation("eager")
        return ids[len(prompt) :], logprobs

    return run


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_completions_are_those_of_a_model_with_rounded_keys(tiny, rounded_alone, name, kv_dtype):
    """Groups of queries, windows, soft caps, sinks; the second prompts begin with cached pages."""
    model = tiny(name)
    engine = Engine(model, page_size=16, kv_dtype=kv_dtype, debug=True)
    for prompts in (PROMPTS[:2], PROMPTS[2:]):
        for prompt, got in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            tokens, logprobs = rounded_alone(model, kv_dtype, prompt, len(got.token_ids))
            assert got.token_ids == tokens
            assert [t.logprob for t in got.logprobs] == pytest.approx(logprobs, abs=5e-3)
    assert engine.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_chunks_preemption_samples_and_drafts_change_nothing(tiny, kv_dtype):
    model = tiny("llama")
    page = PagedCache.bytes_per_page(layer_shapes(model), 16, DTYPES[kv_dtype])
    plain = Engine(model, page_size=16, kv_dtype=kv_dtype)
    small = Engine(
        model, page_size=16, kv_dtype=kv_dtype, memory=13 * page, max_num_seqs=7,
        max_num_batched_tokens=20, speculate="history", debug=True,
    )  # fmt: skip
    sampled = SamplingParams(n=3, seed=1, temperature=0.7, max_tokens=30, ignore_eos=True)
    for params in (GREEDY, sampled, sampled):
        want, got = (engine.generate(PROMPTS, params) for engine in (plain, small))
        for a, b in zip(want, got, strict=True):
            assert [a.token_ids, *(c.token_ids for c in a.others)] == [
                b.token_ids, *(c.token_ids for c in b.others)
            ]  # fmt: skip
    assert small.stats.preemptions > 0 and small.stats.prefix_hit_tokens > 0
    assert small._executor.runner.cache.num_pages == 13


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_scores_are_those_of_generation(tiny, kv_dtype):
    engine = Engine(tiny("llama"), page_size=16, kv_dtype=kv_dtype)
    completions = engine.generate(PROMPTS, GREEDY)
    engine.reset_prefix_cache()
    scores = engine.score(PROMPTS, [c.token_ids for c in completions])
    for completion, score in zip(completions, scores, strict=True):
        total = sum(token.logprob for token in completion.logprobs)
        assert score.error is None and score.logprob == pytest.approx(total, abs=2e-2)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_hold_nearly_twice_the_tokens_of_bf16(dtype, dim):
    shapes = [(8, dim, dim)] * 2
    stored, exact = (PagedCache.bytes_per_page(shapes, 16, d) for d in (dtype, torch.bfloat16))
    assert exact >= 1.9 * stored
    cache = PagedCache(3, 16, shapes, torch.bfloat16, "cpu", dtype)
    held = sum(tensor.nbytes for index in range(2) for tensor in cache.layer(index))
    assert held == 3 * cache.page_bytes == 3 * stored


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_pages_are_copied_with_their_scales(kv_dtype):
    cache = PagedCache(4, 16, [(2, 8, 4)], torch.float32, "cpu", DTYPES[kv_dtype])
    for tensor in cache.layer(0):
        tensor.copy_(torch.randn(tensor.shape) * 50)
    want = [tensor[torch.tensor([2, 1, 1, 3])].float() for tensor in cache.layer(0)]
    cache.copy_pages([2, 1], [0, 2])
    assert all(torch.equal(a.float(), b) for a, b in zip(cache.layer(0), want, strict=True))


@pytest.mark.parametrize(("kv_dtype", "limit"), [("int8", 0.04), ("fp8", 0.09)])
def test_a_real_model_changes_little(shared, kv_dtype, limit):
    """With keys and values in bf16, its log-probabilities change by 0.005."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "stories260k"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact, rounded = Engine(model, tokenizer), Engine(model, tokenizer, kv_dtype=kv_dtype)
    prompts = [f"Once upon a time, {name} had a dog." for name in ("Lily", "Tom", "Ben", "Mia")]
    texts = exact.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=150))
    ids = [tokenizer(p + c.text)["input_ids"] for p, c in zip(prompts, texts, strict=True)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    ours, theirs = (
        [t.logprob for c in engine.generate(ids, params) for t in c.prompt_logprobs[1:]]
        for engine in (rounded, exact)
    )
    changes = torch.tensor(ours) - torch.tensor(theirs)
    assert 0 < changes.abs().mean() < limit


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    parameter = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(parameters=lambda: iter([parameter]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"^kv_dtype='fp8' needs .* 8.0: pass 'int8'$"):
        settings._quantized(model, "fp8")
    assert settings._quantized(model, "int8") == torch.int8
