"""Plan how `sdpa` runs a paged step: shared prefixes once, the sequences in padded batches.

Sequences with a single query (decodes) form batches by length, padded to the longest: sixty-four
of them cost a few calls, not sixty-four. Sequences that start with the same pages (few-shot
examples, a system prompt) share a prefix: all their queries attend to the shared pages in one
product, and each sequence's batch holds only its own pages (vLLM: cascade attention).

    shared pages ▒▒▒▒▒▒▒▒            one product for the queries of all
    own pages            ██ ███ █    padded batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..reference import causal_mask

_MIN_SAVED_KEYS = 1024
"""Key reads that a shared prefix must save to be worth a call of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences with the same number of queries, padded to the keys of the longest."""

    rows: Tensor
    """[n * queries]: the rows of their queries."""
    pages: Tensor
    """[n * P]: page numbers, P for each."""
    count: int
    """n."""
    length: int
    """Keys of the longest."""
    unused: Tensor | None
    """KV slots of the gathered pages that do not belong to their sequence."""
    bias: Tensor | None
    """Added to the scores, -inf where a query does not see a key; None: causal, keys = queries."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """The query rows of sequences that start with the same pages, and those pages."""

    rows: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on besides the sequences."""

    page_size: int
    window: int | None
    share_prefixes: bool
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=16)
def plan(
    cu_seqlens: tuple[int, ...], lengths: tuple[int, ...], table: bytes, key: PlanKey
) -> tuple[list[Batch], list[SharedPrefix]]:
    """Batch the sequences of a step; `table` is the int32 page table as bytes."""
    if not lengths:
        return [], []
    pages = np.frombuffer(table, np.int32).reshape(len(lengths), -1)
    queries = [end - start for start, end in pairwise(cu_seqlens)]
    active = [i for i, length in enumerate(lengths) if queries[i] and length]

    def rows_of(members: Sequence[int]) -> Tensor:
        rows = [row for i in members for row in range(cu_seqlens[i], cu_seqlens[i + 1])]
        return _int_tensor(rows, key)

    shared_pages = [0] * len(lengths)
    prefixes = []
    for members, count in _find_prefixes(pages, active, queries, lengths, key):
        prefix = _int_tensor(pages[members[0], :count], key)
        prefixes.append(SharedPrefix(rows_of(members), prefix))
        for i in members:
            shared_pages[i] = count
    own = [n - skip * key.page_size for n, skip in zip(lengths, shared_pages, strict=True)]
    groups: dict[object, list[int]] = {}
    for i in active:
        group = ((own[i] - 1).bit_length(), -1) if queries[i] == 1 else (0, i)
        groups.setdefault(group, []).append(i)
    batches = []
    for members in groups.values():
        tables = [pages[i, shared_pages[i] :] for i in members]
        batches.append(_batch(rows_of(members), tables, [own[i] for i in members], key))
    return batches, prefixes


def _find_prefixes(
    pages: np.ndarray,
    active: Sequence[int],
    queries: Sequence[int],
    lengths: Sequence[int],
    key: PlanKey,
) -> list[tuple[list[int], int]]:
    """Sequences with the same first page, and how many leading pages all of them share.

    A shared key must precede every query, so pages that contain queries do not count.
    """
    by_first_page: dict[int, list[int]] = {}
    for i in active if key.share_prefixes else ():
        by_first_page.setdefault(int(pages[i, 0]), []).append(i)
    prefixes = []
    for members in by_first_page.values():
        if len(members) < 2:
            continue
        limit = min((lengths[i] - queries[i]) // key.page_size for i in members)
        same = (pages[members, :limit] == pages[members[0], :limit]).all(0)
        count = limit if same.all() else int(same.argmin())
        if count * key.page_size * (len(members) - 1) >= _MIN_SAVED_KEYS:
            prefixes.append((members, count))
    return prefixes


def _batch(
    rows: Tensor, tables: Sequence[np.ndarray], lengths: Sequence[int], key: PlanKey
) -> Batch:
    size, n = key.page_size, len(lengths)
    own, longest = np.array(lengths)[:, None], max(lengths)
    last = (own - 1) // size
    count = -(-longest // size)
    # Past its last page a sequence reads its first page again: it is full, so nothing there
    # belongs to another sequence.
    index = np.arange(count)
    index = np.where(index <= last, index, 0)
    gathered = np.stack([pages[i] for pages, i in zip(tables, index, strict=True)])
    position = (index[:, :, None] * size + np.arange(size)).reshape(n, -1)
    unused = np.flatnonzero(position >= own)
    unused = unused[unused % (count * size) < longest]
    return Batch(
        rows=rows,
        pages=_int_tensor(gathered.reshape(-1), key),
        count=n,
        length=longest,
        unused=_int_tensor(unused, key) if len(unused) else None,
        bias=_bias(len(rows) // n, own, longest, key),
    )


def _bias(queries: int, own: np.ndarray, longest: int, key: PlanKey) -> Tensor | None:
    if queries > 1:
        if queries == longest and key.window is None:
            return None
        mask = causal_mask(queries, longest, key.window, key.device)
    else:
        index = np.arange(longest)
        within = index < own
        within &= index >= own - (key.window or longest)
        mask = torch.from_numpy(within)[:, None, None].to(key.device)
    return additive_mask(mask, key.dtype)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask (True: attend) into one to add to scores: 0 or -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _int_tensor(values: Sequence[int] | np.ndarray, key: PlanKey) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64), device=key.device)
