"""Keys and values in 8 bits: written and read by the kernels as by torch, in any dtype and page."""

from __future__ import annotations

import pytest
import torch
from interpreted_casts import exact_casts
from nopad.attention import PagedCache, Pages, Varlen, attend
from nopad.attention.backends.kv_write import write
from nopad.attention.reference import reference
from nopad.kernels import QKTransform, write_kv, write_qkv

pytestmark = pytest.mark.usefixtures("interpreted")
DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def round_as_a_gpu(interpreted, monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", exact_casts(interpreter._convert_float))


def caches(dtype, count=2, heads=3, dims=(8, 5), page_size=16):
    shape = (heads, *dims)
    return [PagedCache(4, page_size, [shape], torch.float32, "cpu", dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_what_torch_writes(dtype):
    ours, theirs = caches(dtype)
    k = torch.randn(4, 4, 8).transpose(0, 1)[:, :3] * torch.tensor([1e-3, 1.0, 3e4])[:, None]
    v = torch.randn(4, 5, 3).transpose(1, 2)
    v[1] = 0
    slots = torch.tensor([33, 17, -1, 63])
    for cache, writer in ((ours, write_kv), (theirs, write)):
        keys, values, *scales = cache.layer(0)
        writer(k, v, keys, values, slots, *scales)
    for a, b in zip(ours.layer(0), theirs.layer(0), strict=True):
        assert torch.equal(a.float(), b.float()) and a.float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_read_as_such(dtype, value):
    k, v = torch.randn(1, 3, 8), torch.randn(1, 3, 5)
    k[0, 1, 2] = value
    for writer in (write_kv, write):
        (cache,) = caches(dtype, 1)
        keys, values, *scales = cache.layer(0)
        writer(k, v, keys, values, torch.tensor([5]), *scales)
        row = keys[0, 5].float() * scales[0][0, :, 5].float()[:, None]
        assert row[[0, 2]].isfinite().all() and not row[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("many", [False, True])
def test_the_projection_kernel_writes_what_the_write_kernel_does(dtype, many, monkeypatch):
    monkeypatch.setattr("nopad.kernels.qkv_write.MANY_TOKENS", 1 if many else 1024)
    heads, kv_heads, dim, tokens = 4, 2, 16, 3
    ours, theirs = caches(dtype, 2, kv_heads, (dim, dim))
    partials = torch.randn(2, tokens, (heads + 2 * kv_heads) * dim)
    transform = QKTransform(torch.ones(64, dim), torch.zeros(64, dim))
    lengths, slots = torch.tensor([1, 9, 30], dtype=torch.int32), torch.tensor([2, -1, 50])
    keys, values, *scales = ours.layer(0)
    write_qkv(partials, transform, keys, values, lengths, slots, heads, False, scales)
    k, v = partials.sum(0).view(tokens, -1, dim)[:, heads:].split(kv_heads, 1)
    keys, values, *scales = theirs.layer(0)
    write_kv(k, v, keys, values, slots, *scales)
    for a, b in zip(ours.layer(0), theirs.layer(0), strict=True):
        assert torch.equal(a.float(), b.float()) and a.float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (16, {}),
        (48, {"window": 20, "softcap": 3.0, "sinks": torch.randn(4)}),
        pytest.param(256, {"window": 40}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_attention_is_that_of_the_numbers_in_the_pages(dtype, page_size, options, backend):
    """Decodes, a chunk and a prefill; KV slots that no sequence holds are not finite."""
    torch.manual_seed(page_size)
    totals, queries, width = [70, 33, 9, 130], [1, 20, 9, 1], -(-130 // page_size)
    cache = PagedCache(4 * width, page_size, [(2, 32, 24)], torch.float32, "cpu", dtype)
    keys, values, *scales = cache.layer(0)
    for each in scales:
        each.fill_(torch.nan)
    table = torch.randperm(4 * width).view(4, width)
    slots = [
        (table[i][:, None] * page_size + torch.arange(page_size)).flatten()[:n]
        for i, n in enumerate(totals)
    ]
    known = torch.cat(slots)
    k, v = torch.randn(len(known), 2, 32) * 3, torch.randn(len(known), 2, 24)
    write(k, v, keys, values, known, *scales)
    steps = [rows[len(rows) - n :] for rows, n in zip(slots, queries, strict=True)]
    new = torch.cat([(known == slot).nonzero()[0] for slot in torch.cat(steps)])
    lengths = torch.tensor(totals, dtype=torch.int32)
    pages = Pages(cache, table.int(), lengths, torch.cat(steps), max(totals))
    cu_seqlens = torch.tensor([0, *queries]).cumsum(0).int()
    varlen = Varlen(cu_seqlens, max(queries), pages)
    q = torch.randn(sum(queries), 4, 32)
    got = attend(q, k[new], v[new], varlen, backend=backend, **options)
    want = reference(q, k[new], v[new], varlen, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
