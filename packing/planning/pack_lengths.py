"""Plan the packs of a set of lengths at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .overflow import Overflow
from .planner import Plan, Planner, Strategy


def pack_lengths(
    lengths: np.ndarray | Sequence[int],
    budget: int,
    *,
    pool: int | None = 1024,
    strategy: Strategy = "best_fit",
    overflow: Overflow = "split",
    pad_to_multiple_of: int = 1,
    max_length: int | None = None,
) -> Plan:
    """Plan the packs of items of these lengths at once, to inspect them or to pack offline.

    Args:
        lengths: tokens of each item.
        budget: tokens that a pack may hold.
        pool: items that may wait for a pack, as in a stream; None: all of them.
        strategy: "best_fit", "sequential" or "concat", as in `Planner`.
        overflow: what happens to an item longer than a pack: "split", "truncate", "drop" or
            "error".
        max_length: the longest sequence, if shorter than a pack; `overflow` applies to longer ones.
        pad_to_multiple_of: every segment occupies a multiple of this many tokens in its pack.

    >>> plan = pack_lengths([5, 6, 3, 2, 11], budget=8)
    >>> [pack.tolist() for pack in plan], plan.lengths.tolist(), plan.starts.tolist()
    ([[4], [0, 4], [1, 3], [2]], [8, 5, 3, 6, 2, 3], [0, 0, 8, 0, 0, 0])
    """
    lengths = np.asarray(lengths)
    if pool is None:
        capacity = max(1, budget // max(1, pad_to_multiple_of) * pad_to_multiple_of)
        pool = int((lengths // min(capacity, max_length or capacity) + 1).sum()) + 1
    planner = Planner(
        budget, pool=pool, strategy=strategy, overflow=overflow,
        pad_to_multiple_of=pad_to_multiple_of, max_length=max_length,
    )  # fmt: skip
    return Plan.join([planner.feed(lengths), planner.finish()])
