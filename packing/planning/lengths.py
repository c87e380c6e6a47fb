"""Plan a whole set from its lengths: to look before training, or to pack offline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .overflow import Overflow
from .plan import Plan
from .planner import Planner, Strategy


def pack_lengths(
    lengths: np.ndarray | Sequence[int],
    budget: int,
    *,
    pool: int | None = 1024,
    strategy: Strategy = "best_fit",
    overflow: Overflow = "split",
    align: int = 1,
) -> Plan:
    """Plan the packs of items of these lengths, with a pool as in a stream, or None: the whole set.

    >>> plan = pack_lengths([5, 6, 3, 2, 11], budget=8)
    >>> [pack.tolist() for pack in plan], plan.lengths.tolist(), plan.starts.tolist()
    ([[0, 2], [1, 3], [4], [4]], [5, 3, 6, 2, 8, 3], [0, 0, 0, 0, 0, 8])
    """
    lengths = np.asarray(lengths)
    if pool is None:
        room = max(1, budget // max(1, align) * align)
        pool = int((lengths // room + 1).sum()) + 1
    planner = Planner(budget, pool=pool, strategy=strategy, overflow=overflow, align=align)
    return Plan.join([planner.feed(lengths), planner.finish()])
