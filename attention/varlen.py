"""What one attention call works on: T flat tokens cut into N sequences.

A packed training row, a prefill, a decode step and any mix of them are the same thing. They
differ only in where the keys live: beside the queries, or in pages of a cache.

    training   q [aaaa|bb|ccc]              k = this step's tokens
    paged      q [aaaa|b|c]  + Pages        k = everything cached for a, b, c, this step's included
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .paging.cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Where the keys and values of N sequences live, this step's included."""

    cache: PagedCache
    table: Tensor
    """int32 [N, P]: the pages of each sequence, in order; entries past its length are not read."""
    lengths: Tensor
    """int32 [N]: keys each sequence has once this step's are written."""
    slots: Tensor
    """int64 [T]: slot (page * page_size + offset) each token of this step goes to; -1: none."""
    max_length: int
    """An upper bound of `lengths`, on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Varlen:
    """N sequences of queries in T flat tokens; causal inside each, bottom-right aligned."""

    cu_seqlens: Tensor
    """int32 [N+1], from 0 to T; repeated values are empty sequences."""
    max_length: int
    """An upper bound of the N query lengths, on the host."""
    pages: Pages | None = None
