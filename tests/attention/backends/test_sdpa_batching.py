"""Which sequences share a batch, and which pages are read once for several of them."""

import numpy as np
import pytest
import torch
from nopad.attention import PagedCache, Pages, Varlen
from nopad.attention.backends import ScoreParams, sdpa
from nopad.attention.backends.sdpa_batching import PlanKey, plan
from nopad.attention.reference import reference

CPU = torch.device("cpu")
KEY = PlanKey(16, None, True, torch.float32, CPU)


def planned(queries, lengths, tables, key=KEY):
    bounds = (0, *np.cumsum(queries).tolist())
    wide = max(map(len, tables))
    table = np.array([t + [0] * (wide - len(t)) for t in tables], np.int32)
    return plan(bounds, tuple(lengths), table.tobytes(), key)


def prefix_tables(members, shared, own=2):
    """Tables of sequences that begin with the same pages."""
    first = list(range(shared))
    return [first + [100 + i * own + j for j in range(own)] for i in range(members)]


def test_decodes_of_similar_length_make_one_batch():
    batches, prefixes = planned([1] * 4, [20, 30, 500, 25], [[*range(i, i + 40)] for i in range(4)])
    assert [(b.rows.tolist(), b.length) for b in batches] == [([0, 1, 3], 30), ([2], 500)]
    assert not prefixes


def test_pages_that_sequences_begin_with_are_read_once():
    tables = prefix_tables(members=5, shared=40)
    batches, (prefix,) = planned([1, 3, 1, 1, 1], [641, 650, 672, 650, 660], tables)
    assert prefix.pages.tolist() == list(range(40)) and prefix.rows.tolist() == list(range(7))
    assert not set(range(40)) & {p for b in batches for p in b.pages.tolist()}


def test_different_shared_prefixes_stay_apart():
    other = [[200 + p for p in table] for table in prefix_tables(3, 40)]
    tables = [t for pair in zip(prefix_tables(3, 40), other, strict=True) for t in pair]
    _, prefixes = planned([1] * 6, [650] * 6, tables)
    assert [p.rows.tolist() for p in prefixes] == [[0, 2, 4], [1, 3, 5]]
    assert [p.pages.tolist()[:2] for p in prefixes] == [[0, 1], [200, 201]]


def test_a_page_with_queries_in_it_is_nobody_elses():
    """The keys after a query must not reach it through the shared product."""
    _, (prefix,) = planned([1, 20], [1650, 1645], [[*range(104)], [*range(104)]])
    assert prefix.pages.tolist() == list(range((1645 - 20) // 16))


def test_little_is_not_worth_sharing():
    assert planned([1, 1], [65, 70], prefix_tables(2, 4))[1] == []


def test_what_lies_past_a_sequence_is_blanked_or_its_own():
    (batch,), _ = planned([1, 1], [40, 33], [[5, 6, 7], [8, 9, 10]])
    assert batch.pages.tolist() == [5, 6, 7, 8, 9, 10] and batch.length == 40
    assert batch.unused is not None
    assert batch.unused.tolist() == list(range(48 + 33, 48 + 40))
    assert batch.bias is not None
    assert torch.isinf(batch.bias[1, 0, 0]).nonzero().flatten().tolist() == list(range(33, 40))


def test_a_short_sequence_fills_up_with_its_own_first_page():
    (batch,), _ = planned([1, 1], [30, 20], [[5, 6], [8, 9]])
    assert batch.pages.tolist() == [5, 6, 8, 9] and batch.unused is not None
    assert batch.unused.tolist() == list(range(32 + 20, 32 + 30))
    (batch,), _ = planned([1, 1], [60, 33], [[5, 6, 7, 4], [8, 9, 3]])
    assert batch.pages.tolist() == [5, 6, 7, 4, 8, 9, 3, 8]


def test_no_sequences_make_no_batches():
    assert plan((0,), (), b"", KEY) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_shared_pages_are_read_in_wide_dtypes(dtype):
    cache = PagedCache(600, 16, [(2, 8, 8)], dtype, CPU)
    for tensor in cache.layer(0):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    table = torch.tensor(prefix_tables(members=5, shared=40), dtype=torch.int32)
    lengths = torch.tensor([641, 650, 672, 650, 660], dtype=torch.int32)
    varlen = Varlen(torch.arange(6).int(), 1, Pages(cache, table, lengths, torch.zeros(0), 672))
    q = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    unused = torch.zeros(5, 2, 8, dtype=dtype)
    got = sdpa.paged(q, *cache.layer(0), varlen, ScoreParams(0.3))
    torch.testing.assert_close(got, reference(q, unused, unused, varlen, scale=0.3))
