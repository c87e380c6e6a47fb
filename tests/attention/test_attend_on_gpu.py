"""What only a GPU can show: graphs, no waiting for the device, compilation with real kernels."""

import copy

import pytest
import torch
from nopad.attention import PagedCache, Pages, Varlen, attend
from nopad.attention.hf import check_packed, check_paged, packed_batch, random_documents
from nopad.attention.image_spans import attend_image_spans
from nopad.attention.reference import reference
from nopad.cli.tiny_model import randomize_weights, tiny_config

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, PAGE, BATCH = 8, 2, 64, 16, 6


def decode_step(max_length=512):
    """Static buffers of a decode step, as an engine keeps them."""
    cache = PagedCache(BATCH * 32, PAGE, [(KV_HEADS, DIM, DIM)], torch.bfloat16, "cuda")
    for tensor in cache.layer(0):
        tensor.normal_()
    table = torch.randperm(BATCH * 32, device="cuda").int().view(BATCH, 32)
    lengths = torch.ones(BATCH, dtype=torch.int32, device="cuda")
    slots = torch.full((BATCH,), -1, device="cuda")
    cu_seqlens = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda")
    return Varlen(cu_seqlens, 1, Pages(cache, table, lengths, slots, max_length))


def draw(tokens=BATCH):
    shapes = [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def assert_like_the_oracle(got, q, k, v, varlen):
    low = reference(q, k, v, varlen)
    high = reference(q.double(), k.double(), v.double(), varlen)
    assert (got - high).abs().max() <= 2 * (low - high).abs().max() + 1e-3


def test_a_captured_decode_follows_its_buffers():
    varlen, (q, k, v) = decode_step(), draw()
    attend(q, k, v, varlen, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, varlen, backend="triton")
    for lengths in ([1, 16, 17, 200, 511, 33], [512, 1, 1, 1, 64, 300]):
        pages = varlen.pages
        pages.lengths.copy_(torch.tensor(lengths))
        pages.table.copy_(torch.randperm(BATCH * 32, device="cuda").view(BATCH, 32))
        last = pages.lengths.long() - 1
        page = pages.table.gather(1, (last // PAGE)[:, None])[:, 0]
        pages.kv_slots.copy_(page * PAGE + last % PAGE)
        for static, fresh in zip((q, k, v), draw(), strict=True):
            static.copy_(fresh)
        graph.replay()
        assert_like_the_oracle(out, q, k, v, varlen)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_paged_call_never_waits_for_the_device(queries):
    varlen = decode_step()
    cu_seqlens = varlen.cu_seqlens * queries
    varlen = Varlen(cu_seqlens, queries, varlen.pages)
    varlen.pages.lengths.fill_(40)
    q, k, v = draw(BATCH * queries)
    slots = torch.full((BATCH * queries,), -1, device="cuda")
    pages = varlen.pages
    pages = Pages(pages.cache, pages.table, pages.lengths, slots, pages.max_length)
    varlen = Varlen(cu_seqlens, queries, pages)
    attend(q, k, v, varlen)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(q, k, v, varlen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_like_the_oracle(out, q, k, v, varlen)


def test_slots_are_written_and_minus_one_is_not():
    varlen, (q, k, v) = decode_step(), draw()
    before = [t.clone() for t in varlen.pages.cache.layer(0)]
    varlen.pages.kv_slots.copy_(torch.tensor([3, -1, 40, -1, 41, 100]))
    attend(q, k, v, varlen, backend="triton")
    for tensor, old, new in zip(varlen.pages.cache.layer(0), before, (k, v), strict=True):
        flat, kept = tensor.flatten(0, 1), old.flatten(0, 1)
        for row, slot in ((0, 3), (2, 40), (4, 41), (5, 100)):
            kept[slot] = new[row]
        assert torch.equal(flat, kept)


def tiny(attention, dtype):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING["llama"]())
    config.head_dim = 64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize_weights(model)
    return model.eval().to("cuda", dtype)


def test_training_through_the_chosen_kernels_compiles_to_one_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny("nopad", torch.bfloat16)
    batch = packed_batch(random_documents(model))
    batch |= {"max_length_q": 41, "max_length_k": 41, "labels": batch["input_ids"]}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    plain, fast = model(**batch), compiled(**batch)
    fast.loss.backward()
    assert counter.frame_count == 1
    assert (plain.logits - fast.logits).abs().max() < 0.1 * plain.logits.abs().max()


def test_a_model_packs_and_pages_alike_in_fp32():
    model, oracle = tiny("nopad", torch.float32), tiny("eager", torch.float32)
    assert check_packed(model, oracle).within()
    assert check_paged(model) < 1e-3


def test_deterministic_mode_gives_the_same_gradients_twice():
    q, k, v = (x.requires_grad_() for x in draw(4096))
    varlen = Varlen(torch.tensor([0, 3000, 4096], dtype=torch.int32, device="cuda"), 3000)
    grad = torch.randn(4096, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (
            torch.autograd.grad(attend(q, k, v, varlen), (q, k, v), grad) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_copies_of_pages_read_before_they_write():
    cache = decode_step().pages.cache
    old = copy.deepcopy(cache.layer(0))
    cache.copy_pages([0, 1], [1, 2])
    for tensor, before in zip(cache.layer(0), old, strict=True):
        assert torch.equal(tensor[1], before[0]) and torch.equal(tensor[2], before[1])


@pytest.mark.parametrize("window", [None, 512])
def test_images_that_see_themselves_are_those_of_a_cpu_in_fp32(window):
    varlen = Varlen(torch.tensor([0, 1500, 2048], dtype=torch.int32), 1500)
    joined = torch.zeros(2048, dtype=torch.bool)
    for first in (40, 700, 1600):
        joined[first : first + 255] = True
    params = {"scale": DIM**-0.5, "window": window, "softcap": None, "sinks": None}
    low, results = [x.requires_grad_() for x in draw(2048)], []
    for device, tensors in (("cuda", low), ("cpu", [x.detach().float().cpu() for x in low])):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        here = Varlen(varlen.cu_seqlens.to(device), 1500)
        causal = attend(q, k, v, here, **params)
        out = attend_image_spans(causal, q, k, v, here, joined.to(device), params)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        gradients = torch.autograd.grad(out, (q, k, v), cotangent.to(out))
        results.append([x.float().cpu() for x in (out, *gradients)])
    for ours, gold in zip(*results, strict=True):
        assert (ours - gold).norm() < 0.02 * gold.norm()
