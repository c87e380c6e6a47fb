"""Document lengths for bench_packing: easy mixes have many short documents, hard ones few."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Mix:
    """Document lengths, none longer than the budget."""

    name: str
    lengths: np.ndarray
    budget: int
    easy: bool


def mixes(docs: int, seed: int = 7) -> list[Mix]:
    """Draw all mixes; the first two are the easy ones, as in the packers' published figures."""
    rng = np.random.default_rng(seed)

    def lognormal(median, sigma, budget):
        return np.clip(rng.lognormal(np.log(median), sigma, docs), 1, budget).astype(np.int64)

    def two_sizes(fraction, large, small, budget):
        longer, shorter = (rng.normal(mean, std, docs) for mean, std in (large, small))
        lengths = np.where(rng.random(docs) < fraction, longer, shorter)
        return np.clip(lengths, 1, budget).astype(np.int64)

    return [
        Mix("lognormal 350 1.1", lognormal(350, 1.1, 2048), 2048, True),
        Mix("lognormal 350 1.1", lognormal(350, 1.1, 8192), 8192, True),
        Mix("lognormal 900 .35", lognormal(900, 0.35, 2048), 2048, False),
        Mix("lognormal 1500 .5", lognormal(1500, 0.5, 4096), 4096, False),
        Mix("lognormal 2500 .6", lognormal(2500, 0.6, 8192), 8192, False),
        Mix("lognormal 3600 .35", lognormal(3600, 0.35, 8192), 8192, False),
        Mix("two sizes", two_sizes(0.5, (1400, 100), (500, 80), 2048), 2048, False),
        Mix("two sizes", two_sizes(0.3, (5600, 500), (900, 300), 8192), 8192, False),
        Mix("just over half", rng.integers(1025, 1200, docs), 2048, False),
        Mix("about a third", rng.integers(2500, 2900, docs), 8192, False),
        Mix("uniform", rng.integers(1, 2049, docs), 2048, False),
        Mix("uniform", rng.integers(1, 8193, docs), 8192, False),
    ]
