"""Paged decode attention, however the keys are split, and how the splits are chosen."""

import pytest
import torch
import triton
import triton.language as tl
from nopad.attention import PagedCache, Pages, Varlen
from nopad.attention.backends import triton_paged
from nopad.attention.reference import reference
from nopad.kernels import MIN_SPLIT_KEYS, DecodeTiles, paged_attention_decode, paged_decode
from nopad.kernels.paged_decode import _num_splits

pytestmark = pytest.mark.usefixtures("runnable")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM = 3, 1, 16
SLOW = pytest.mark.slow  # interpreted, each takes more than a second
LENGTHS = [290, 1, 64, 400]


def step(page_size):
    """A decode over pages; slots that no sequence holds are NaN, and the table ends in such."""
    make = torch.Generator().manual_seed(page_size)
    need = [-(-n // page_size) for n in LENGTHS]
    deck = torch.randperm(sum(need), generator=make).int()
    cache = PagedCache(sum(need) + 1, page_size, [(KV_HEADS, DIM, DIM)], torch.float32, DEVICE)
    for tensor in cache.layer(0):
        tensor.fill_(torch.nan)
    table = torch.full((len(LENGTHS), max(need) + 3), sum(need), dtype=torch.int32)
    for row, length, pages in zip(table, LENGTHS, deck.split(need), strict=True):
        row[: len(pages)] = pages
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        for tensor in cache.layer(0):
            rows = torch.randn(length, KV_HEADS, DIM, generator=make)
            tensor.view(-1, KV_HEADS, DIM)[slots.to(DEVICE)] = rows.to(DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    slots = torch.full((len(LENGTHS),), -1, device=DEVICE)
    lengths = torch.tensor(LENGTHS, **ints)
    pages = Pages(cache, table.to(DEVICE), lengths, slots, max(LENGTHS))
    q = torch.randn(len(LENGTHS), HEADS, DIM, generator=make).to(DEVICE)
    return q, Varlen(torch.arange(len(LENGTHS) + 1, **ints), 1, pages)


@pytest.mark.parametrize("page_size", [16, 48, *(pytest.param(n, marks=SLOW) for n in (64, 256))])
@pytest.mark.parametrize(("block", "splits"), [(64, 1), (32, 2), (16, 4)])
def test_any_cut_of_the_keys_gives_the_same_result(page_size, block, splits):
    """Blocks inside a page, of several pages and across their edges; splits of several blocks."""
    q, varlen = step(page_size)
    keys, values = varlen.pages.cache.layer(0)
    paging = varlen.cu_seqlens, varlen.pages.table, varlen.pages.lengths
    out = torch.full_like(q, torch.nan)
    tiles = DecodeTiles(block, splits, 4, 2)
    paged_attention_decode(q, keys, values, *paging, out, tiles, scale=DIM**-0.5)
    want = reference(q, *(q.new_empty(0, KV_HEADS, DIM) for _ in range(2)), varlen)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def spread(x):
    """The same numbers, with more than 2^31 elements from the first token to the last."""
    token = 2**31 // (len(x) - 1) + 16
    storage = torch.empty((len(x) - 1) * token + x[0].numel(), dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, (token, *x.stride()[1:])).copy_(x)


@pytest.mark.parametrize("splits", [1, 4])
def test_tokens_may_lie_further_apart_than_32_bits_count(splits):
    q, varlen = step(64)
    q, (keys, values) = q.half(), (x.half() for x in varlen.pages.cache.layer(0))
    paging = varlen.cu_seqlens, varlen.pages.table, varlen.pages.lengths
    near, far = torch.zeros_like(q), spread(torch.zeros_like(q))
    tiles = DecodeTiles(64, splits, 4, 2)
    paged_attention_decode(q, keys, values, *paging, near, tiles, scale=DIM**-0.5)
    paged_attention_decode(spread(q), keys, values, *paging, far, tiles, scale=DIM**-0.5)
    assert torch.equal(near, far) and near.any()


@triton.jit
def splits_kernel(cu_seqlens, lengths, out, num_seqs, programs, most, BLOCK: tl.constexpr):
    splits = _num_splits(cu_seqlens, lengths, num_seqs, programs, most, 0, False, BLOCK, 64)
    tl.store(out + tl.arange(0, BLOCK), splits)


def splits_of(lengths, queries, programs, max_splits=64):
    cu_seqlens = torch.tensor([0, *queries], device=DEVICE).cumsum(0).int()
    out = torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    splits_kernel[(1,)](cu_seqlens, lengths, out, len(queries), programs, max_splits, BLOCK=16)
    assert not out[len(queries) :].any()
    return out[: len(queries)].tolist()


@pytest.mark.parametrize(
    ("lengths", "programs", "want"),
    [
        ([1000] * 8, 8, [1] * 8),  # as many sequences as programs: none is split
        ([1000] * 8, 15, [1] * 8),  # not into halves that would run one after the other
        ([1000] * 4, 9, [2] * 4),
        ([1000] * 7 + [8000], 8, [1] * 7 + [4]),  # one long sequence does not run on alone
        ([1, 50, 100, 130], 40, [1, 1, 1, 2]),  # a split is worth a program
        ([30000], 66, [64]),
    ],
)
def test_keys_are_shared_out_evenly_by_the_real_lengths(lengths, programs, want):
    assert splits_of(lengths, [1] * len(lengths), programs) == want
    assert sum(want) <= programs + len(lengths)


def test_only_sequences_with_one_query_get_a_share():
    assert splits_of([500, 900, 7, 500], [1, 30, 0, 1], programs=4) == [2, 0, 0, 2]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("max_keys", [16, 1000, 32768])
@pytest.mark.parametrize("count", [1, 5, 16, 64, 500])
def test_four_programs_fit_a_processor(monkeypatch, count, max_keys, dim):
    monkeypatch.setattr(paged_decode, "sm_count", lambda device: 132)
    q = torch.empty(count, 32, dim, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, 16, 8, dim, dtype=torch.bfloat16, device="meta")
    tiles = triton_paged.decode_tiles(q, keys, keys, count, max_keys)
    assert tiles.max_splits in (1, 2, 4, 8, 16, 32, 64)
    split_keys = tiles.max_splits * MIN_SPLIT_KEYS
    assert tiles.max_splits == 1 or (count <= 132 and split_keys <= max_keys)
    assert tiles.max_splits > 1 or count > 132 or max_keys < 2 * MIN_SPLIT_KEYS
    registers = tiles.max_registers
    assert registers is None or 4 * 32 * tiles.num_warps * registers == 65536
