"""The decode kernel, however its keys are cut, and how the cut is chosen."""

import pytest
import torch
from nopad.attention import PagedCache, Pages, Varlen
from nopad.attention.backends import triton_paged
from nopad.attention.backends.ask import Scores
from nopad.attention.backends.triton_decode import DecodeTiles, decode
from nopad.attention.reference import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM = 3, 1, 16
LENGTHS = [1, 64, 65, 257]


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


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize(("block", "splits"), [(64, 1), (32, 2), (128, 4)])
def test_any_cut_of_the_keys_gives_the_same_result(page_size, block, splits):
    """Blocks inside a page, of several pages and across their edges; splits without a key."""
    q, varlen = step(page_size)
    keys, values = varlen.pages.cache.layer(0)
    where = varlen.cu_seqlens, varlen.pages.table, varlen.pages.lengths
    out = torch.full_like(q, torch.nan)
    decode(q, keys, values, *where, Scores(DIM**-0.5), out, DecodeTiles(block, splits, 4, 2))
    want = reference(q, *(q.new_empty(0, KV_HEADS, DIM) for _ in range(2)), varlen)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("reach", [16, 1000, 32768])
@pytest.mark.parametrize("count", [1, 5, 16, 64, 500])
def test_sequences_are_split_until_all_programs_run_at_once_and_no_further(
    monkeypatch, count, reach, dim
):
    monkeypatch.setattr(triton_paged, "processors", lambda device: 132)
    q = torch.empty(count, 32, dim, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, 16, 8, dim, dtype=torch.bfloat16, device="meta")
    tiles = triton_paged.decode_tiles(q, keys, keys, count, reach)
    programs = count * 8 * tiles.splits
    assert tiles.splits == 1 or (programs <= 4 * 132 and tiles.splits * tiles.block <= reach)
    could = 2 * programs <= 4 * 132 and 2 * tiles.splits * tiles.block <= reach
    assert not could or tiles.splits == 64
    if tiles.registers is not None:
        assert 4 * 32 * tiles.warps * tiles.registers <= 65536
