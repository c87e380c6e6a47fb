"""What a pack costs to train on: a part linear in its tokens, and attention, quadratic in lengths.

    cost = linear · Σ length  +  quadratic · Σ length²

Packs of equal tokens differ in the second sum, and the ranks of a step wait for the dearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients of a model; the default is a 7B model (hidden size 4096) as verl counts it.

    >>> Cost().of(np.array([1000, 2000])).tolist()
    [25576000.0, 53152000.0]
    """

    linear: float = 24576.0
    quadratic: float = 1.0

    def __post_init__(self):
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic == 0:
            raise ValueError(f"a cost grows with the length, got {self}")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Give the cost of sequences."""
        lengths = lengths.astype(np.float64)
        return (self.linear + self.quadratic * lengths) * lengths

    def of_packs(self, plan: Plan) -> np.ndarray:
        """Give the cost of each pack."""
        return plan.sums(self.of(plan.lengths))
