"""How the sequences of a paged step are batched for SDPA: planned once, used by every layer.

Sequences with a single query (decodes) go together, by length, their pages side by side in one
padded batch: sixty-four of them cost a few calls and not sixty-four. Sequences that begin with the
same pages (the examples before a question, a system prompt) are a family: all its queries attend
to the shared pages in one product, and each sequence's batch holds only what is its own.

    family   shared pages ▒▒▒▒▒▒▒▒            one product for the queries of all
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

from ..reference import visible

_WORTH_SHARING = 1024
"""Keys that need not be read again, from which on a family is worth a call of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences with as many queries each, padded to the keys of the longest."""

    rows: Tensor
    """[n * queries]: their queries."""
    pages: Tensor
    """[n * P]: page numbers, P for each."""
    count: int
    """n."""
    length: int
    """Keys of the longest."""
    stale: Tensor | None
    """Slots of the gathered pages that belong to nobody here."""
    bias: Tensor | None
    """Added to the scores, -inf where a query does not see a key; None: causal, keys = queries."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Queries of sequences that begin with the same pages."""

    rows: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan depends on, besides the sequences."""

    page_size: int
    window: int | None
    shares: bool
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=16)
def plan(
    bounds: tuple[int, ...], lengths: tuple[int, ...], table: bytes, layout: Layout
) -> tuple[list[Batch], list[Family]]:
    """Batch the sequences whose queries lie at `bounds` and whose pages the table (int32) holds."""
    if not lengths:
        return [], []
    pages = np.frombuffer(table, np.int32).reshape(len(lengths), -1)
    queries = [end - start for start, end in pairwise(bounds)]
    alive = [i for i, length in enumerate(lengths) if queries[i] and length]
    skipped = [0] * len(lengths)
    families = []
    for members, shared in _families(pages, alive, queries, lengths, layout):
        rows = [row for i in members for row in range(bounds[i], bounds[i + 1])]
        families.append(Family(_ints(rows, layout), _ints(pages[members[0], :shared], layout)))
        for i in members:
            skipped[i] = shared
    own = [n - skip * layout.page_size for n, skip in zip(lengths, skipped, strict=True)]
    together: dict[object, list[int]] = {}
    for i in alive:
        key = ((own[i] - 1).bit_length(), -1) if queries[i] == 1 else (0, i)
        together.setdefault(key, []).append(i)
    batches = []
    for members in together.values():
        rows = _ints([row for i in members for row in range(bounds[i], bounds[i + 1])], layout)
        held = [pages[i, skipped[i] :] for i in members]
        batches.append(_batch(rows, held, [own[i] for i in members], layout))
    return batches, families


def _families(
    pages: np.ndarray,
    alive: Sequence[int],
    queries: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
) -> list[tuple[list[int], int]]:
    """Sequences with the same first page, and how many leading pages all of them share.

    A shared key must be before every query, so pages that queries themselves lie in do not count.
    """
    by_first: dict[int, list[int]] = {}
    for i in alive if layout.shares else ():
        by_first.setdefault(int(pages[i, 0]), []).append(i)
    found = []
    for members in by_first.values():
        if len(members) < 2:
            continue
        most = min((lengths[i] - queries[i]) // layout.page_size for i in members)
        same = (pages[members, :most] == pages[members[0], :most]).all(0)
        shared = most if same.all() else int(same.argmin())
        if shared * layout.page_size * (len(members) - 1) >= _WORTH_SHARING:
            found.append((members, shared))
    return found


def _batch(
    rows: Tensor, held: Sequence[np.ndarray], lengths: Sequence[int], layout: Layout
) -> Batch:
    size, n = layout.page_size, len(lengths)
    own, longest = np.array(lengths)[:, None], max(lengths)
    last = (own - 1) // size
    count = -(-longest // size)
    # Past its last page a sequence reads its first again: full, so nothing there is another's.
    place = np.arange(count)
    place = np.where(place <= last, place, 0)
    used = np.stack([pages[at] for pages, at in zip(held, place, strict=True)])
    slot = (place[:, :, None] * size + np.arange(size)).reshape(n, -1)
    stale = np.flatnonzero(slot >= own)
    stale = stale[stale % (count * size) < longest]
    return Batch(
        rows=rows,
        pages=_ints(used.reshape(-1), layout),
        count=n,
        length=longest,
        stale=_ints(stale, layout) if len(stale) else None,
        bias=_bias(len(rows) // n, own, longest, layout),
    )


def _bias(queries: int, own: np.ndarray, longest: int, layout: Layout) -> Tensor | None:
    if queries > 1:
        if queries == longest and layout.window is None:
            return None
        seen = visible(queries, longest, layout.window, layout.device)
    else:
        key = np.arange(longest)
        within = key < own
        within &= key >= own - (layout.window or longest)
        seen = torch.from_numpy(within)[:, None, None].to(layout.device)
    return blind(seen, layout.dtype)


def blind(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores so that only the seen ones count."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _ints(values: Sequence[int] | np.ndarray, layout: Layout) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64), device=layout.device)
