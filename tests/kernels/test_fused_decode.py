"""Fused decode attention, from partial projections to outputs and pages, against single steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from nopad.attention import PagedCache, Pages, Varlen, attend
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import (
    MAX_FUSED_SEQS,
    DecodeTiles,
    QKTransform,
    fused_decode_attention,
    fused_decode_tiles,
    write_qkv,
)

pytestmark = pytest.mark.usefixtures("interpreted")
LENGTHS = [1, 17, 40, 33, 100]
PAGE_SIZE, MAX_PAGES, EPS = 16, 8, 1e-6
SKIPPED = 3  # a row without a request: nothing is written for it


@dataclass
class Step:
    """Inputs of one decode step, and the queries and outputs that single operations give."""

    partials: torch.Tensor
    transform: QKTransform
    pages: Pages
    expected_pages: Pages
    queries: torch.Tensor
    expected: torch.Tensor


def paged_step(kv_heads, dim):
    """Two copies of the same random pages, for five sequences."""
    count = len(LENGTHS)
    table = torch.arange(count * MAX_PAGES, dtype=torch.int32).view(count, -1).flip(1).contiguous()
    last = [(n - 1) // PAGE_SIZE for n in LENGTHS]
    slots = [
        int(table[i, p]) * PAGE_SIZE + (LENGTHS[i] - 1) % PAGE_SIZE for i, p in enumerate(last)
    ]
    slots[SKIPPED] = -1
    shapes = [(kv_heads, dim, dim)]
    caches = [PagedCache(table.numel(), PAGE_SIZE, shapes, torch.float32, "cpu") for _ in "ab"]
    for ours, theirs in zip(*(cache.layer(0) for cache in caches), strict=True):
        theirs.copy_(ours.normal_())
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return [Pages(cache, table, lengths, torch.tensor(slots), 128) for cache in caches]


@pytest.fixture(
    params=[
        (6, 2, 32, False, False),
        (4, 4, 16, True, True),
        pytest.param((8, 2, 64, True, False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def step(request) -> Step:
    heads, kv_heads, dim, has_norm, has_bias = request.param
    torch.manual_seed(dim)
    pages, expected_pages = paged_step(kv_heads, dim)
    partials = torch.randn(3, len(LENGTHS), (heads + 2 * kv_heads) * dim)
    angles = torch.randn(128, dim // 2).repeat(1, 2)
    bias = torch.randn(partials.shape[2]) if has_bias else None
    gains = (torch.randn(dim), torch.randn(dim)) if has_norm else (None, None)
    projected = partials.sum(0) if bias is None else partials.sum(0) + bias
    q, k, v = projected.view(len(LENGTHS), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if has_norm:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain
            for x, gain in zip((q, k), gains, strict=True)
        )
    positions = torch.tensor(LENGTHS) - 1
    cos, sin = angles.cos()[positions], angles.sin()[positions]
    q, k = (x[0].transpose(0, 1) for x in apply_rotary_pos_emb(
        *(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None]
    ))  # fmt: skip
    cu_seqlens = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    expected = attend(q, k, v, Varlen(cu_seqlens, 1, expected_pages), layer=0)
    transform = QKTransform(angles.cos(), angles.sin(), bias, *gains, EPS)
    return Step(partials, transform, pages, expected_pages, q, expected)


def assert_same_pages(step):
    layers = (pages.cache.layer(0) for pages in (step.pages, step.expected_pages))
    for ours, theirs in zip(*layers, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


LONGER = pytest.mark.slow  # interpreted, each takes three seconds
MORE_TILES = [(1, 16), (1, 32), (2, 16), (2, 32), (4, 16)]


@pytest.mark.parametrize("many", [False, True])
def test_queries_are_returned_and_keys_and_values_written(step, many, monkeypatch):
    monkeypatch.setattr("nopad.kernels.qkv_write.MANY_TOKENS", 1 if many else 1024)
    pages, heads = step.pages, step.queries.shape[1]
    cache = pages.cache.layer(0)
    q = write_qkv(
        step.partials, step.transform, *cache, pages.lengths, pages.kv_slots, heads, use_pdl=False
    )
    assert_close(q, step.queries, rtol=1e-4, atol=1e-5)
    assert_same_pages(step)


@pytest.mark.parametrize(  # with one page per block, and several
    ("num_splits", "block_n"),
    [(4, 32), *(pytest.param(*tile, marks=LONGER) for tile in MORE_TILES)],
)
def test_one_kernel_computes_what_single_operations_compute(step, num_splits, block_n):
    pages, (heads, dim) = step.pages, step.queries.shape[1:]
    keys, values = pages.cache.layer(0)
    counters = torch.zeros(len(LENGTHS), keys.shape[2], dtype=torch.int32)
    out = fused_decode_attention(
        step.partials, step.transform, keys, values, pages.table, pages.lengths, pages.kv_slots,
        heads, dim**-0.5, DecodeTiles(block_n, num_splits, 4, 2), counters, use_pdl=False,
    )  # fmt: skip
    rows = [row for row in range(len(LENGTHS)) if row != SKIPPED]
    assert_close(out[rows], step.expected[rows], rtol=1e-4, atol=1e-5)
    assert not counters.any()
    assert_same_pages(step)


def test_one_kernel_is_for_few_sequences_and_programs_of_few_keys(monkeypatch):
    monkeypatch.setattr("nopad.kernels.fused_decode.sm_count", lambda device: 132)
    keys = torch.empty(1, 256, 8, 64, device="meta", dtype=torch.bfloat16)

    def splits(num_seqs: int, max_length: int) -> int | None:
        tiles = fused_decode_tiles(keys, 32, num_seqs, max_length)
        return None if tiles is None else tiles.max_splits

    assert [splits(n, 2048) for n in (1, 4, 8, 16, 32, 64, 128)] == [16, 16, 8, 4, 4, 2, 1]
    assert splits(MAX_FUSED_SEQS + 1, 1024) is None
    assert (splits(64, 4096), splits(64, 8192), splits(128, 4096)) == (2, None, None)


@pytest.mark.parametrize(
    ("dim", "num_seqs", "expected"),
    [
        (64, 128, DecodeTiles(64, 1, num_warps=2, num_stages=4)),
        (64, 16, DecodeTiles(128, 4, 4, 2, max_registers=128)),
        (128, 128, DecodeTiles(32, 1, num_warps=2, num_stages=4)),
        (128, 32, DecodeTiles(64, 4, 4, 2, max_registers=128)),
        (128, 16, DecodeTiles(64, 4, 4, 3, max_registers=128)),
        (256, 128, DecodeTiles(32, 1, num_warps=4, num_stages=2)),
    ],
)
def test_blocks_hold_as_many_bytes_for_every_head_dim(dim, num_seqs, expected, monkeypatch):
    monkeypatch.setattr("nopad.kernels.fused_decode.sm_count", lambda device: 132)
    keys = torch.empty(1, 256, 8, dim, device="meta", dtype=torch.bfloat16)
    assert fused_decode_tiles(keys, 32, num_seqs, 2048) == expected


@pytest.mark.parametrize(
    ("heads", "dtype", "expected"),
    [(32, torch.float16, 128), (128, torch.float16, None), (32, torch.float32, None)],
)
def test_registers_are_limited_where_none_spill(heads, dtype, expected, monkeypatch):
    monkeypatch.setattr("nopad.kernels.fused_decode.sm_count", lambda device: 132)
    keys = torch.empty(1, 256, 8, 64, device="meta", dtype=dtype)
    tiles = fused_decode_tiles(keys, heads, 16, 2048)
    assert tiles is not None and tiles.max_registers == expected
