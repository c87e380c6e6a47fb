"""How often must documents meet again, where packs have to be full?

    python benchmarks/order_bound.py [--record FILE]
    python benchmarks/order_bound.py --lengths gsm8k --documents 600 --fills 95 97.5

A planner that shuffles puts documents i and j together with a probability p_ij, so the expected
number of pairs that meet in two epochs is the sum of p_ij². The least sum for an expected number K
of packs is a convex problem. This computes a lower bound to it, for every planner that draws its
epochs independently: only packs of two are counted, packs of three or more are free.

    minimise    Σ z_ij²                     z_ij: how often i and j are a pack of two
    subject to  every document is in one pack, and at most K packs, on average

    dual        Σ u_i - λ K - Σ max(0, u_i + u_j - λ)² / 4     over the i, j that fit a pack
    if          λ >= Σ u over a pack, for every pack of one, three or more

Any u gives a bound, with the largest such sum as λ: a knapsack finds it exactly. How u was found
does not matter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from bench_order import gsm8k_lengths, lognormal_lengths, plan_epoch
from record import header, write_record
from scipy.optimize import minimize

CASES = [
    ("gsm8k", 50, 2, [90, 92.16]),
    ("gsm8k", 600, 2, [90, 93, 95, 96.74, 97.5]),
    ("gsm8k", 2000, 2, [96, 97.5, 98.38]),
    ("gsm8k", 7473, 2, [96, 97.5, 98.22]),
]
"""Lengths, documents, budget in mean lengths, fills in percent."""
LARGEST = 6.0
"""Bound on |u|, so that a problem whose packs are not all known yet has a solution."""


class MeetingBound:
    """The dual problem of a set of lengths; documents of one length share their u."""

    def __init__(self, lengths: np.ndarray, budget: int):
        self.sizes, self.counts = np.unique(lengths, return_counts=True)
        self.budget = budget
        pairs = np.outer(self.counts, self.counts) - np.diag(self.counts)
        fits = self.sizes[:, None] + self.sizes[None, :] <= budget
        self.pairs = np.where(fits, pairs, 0) / 2.0
        """Pairs of documents by their lengths; half of them on each side of the diagonal."""
        self.start = np.append(self.sizes / budget, 1.0)
        """u and λ, where the next search starts."""
        known = np.concatenate([np.eye(len(self.sizes)), self.best_packs(self.start[:-1])[1]])
        self.known = np.unique(known, axis=0)
        """Packs whose sum must not exceed λ, found so far."""

    def best_packs(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the largest sums of u over packs of one, three and more, and these packs."""
        best, chosen, sums, packs = np.zeros(self.budget + 1), [], [], []
        for documents in range(1, self.budget // self.sizes[0] + 1):
            value = np.full((len(u), self.budget + 1), -np.inf)
            for i, size in enumerate(self.sizes):
                value[i, size:] = u[i] + best[: self.budget + 1 - size]
            best, layer = value.max(0), value.argmax(0)
            for i in np.flatnonzero(np.isfinite(value[:, -1])) if documents != 2 else ():
                pack, room = np.zeros(len(u)), self.budget - self.sizes[i]
                pack[i] += 1
                for earlier in reversed(chosen):
                    pack[earlier[room]] += 1
                    room -= self.sizes[earlier[room]]
                sums.append(value[i, -1])
                packs.append(pack)
            chosen.append(layer)
        return np.array(sums), np.array(packs)

    def dual(self, u: np.ndarray, limit: float, packs: float) -> tuple[float, np.ndarray]:
        """Return the dual function, and its slope in u and in the limit (λ)."""
        excess = np.maximum(u[:, None] + u[None, :] - limit, 0)
        weighted = excess * self.pairs
        value = self.counts @ u - limit * packs - (excess * weighted).sum() / 4
        return value, np.append(self.counts - weighted.sum(1), weighted.sum() / 2 - packs)

    def least_meetings(self, packs: float, rounds: int = 16) -> float:
        """Return a lower bound on the expected number of pairs that meet again.

        Each call starts from the u and the packs of the one before.
        """
        best = 0.0
        for round_index in range(rounds):
            known, weight = self.known, 30.0 * 2.0**round_index

            def penalised(x, known=known, weight=weight):
                value, slope = self.dual(x[:-1], x[-1], packs)
                over = np.maximum(known @ x[:-1] - x[-1], 0)
                slope -= 2 * weight * np.append(over @ known, -over.sum())
                return weight * (over @ over) - value, -slope

            limits = [(-LARGEST, LARGEST)] * len(self.start)
            options = {"maxiter": 300}
            self.start = minimize(
                penalised, self.start, jac=True, method="L-BFGS-B", bounds=limits, options=options
            ).x
            u, limit = self.start[:-1], self.start[-1]
            sums, found = self.best_packs(u)
            best = max(best, self.dual(u, sums.max(), packs)[0])
            self.known = np.unique(np.concatenate([known, found[sums > limit]]), axis=0)
        return best


def pairs_of(packs: list[np.ndarray]) -> int:
    """Count the pairs that share a pack."""
    return sum(len(pack) * (len(pack) - 1) // 2 for pack in packs)


def bounds_of(name: str, documents: int, multiple: float, fills: list[float]) -> list[dict]:
    """Compute the bounds of one set, also relative to chance."""
    lengths = {"gsm8k": gsm8k_lengths, "lognormal": lognormal_lengths}[name](documents)
    budget = int(lengths.mean() * multiple)
    lengths = np.minimum(lengths, budget)
    bound, rows = MeetingBound(lengths, budget), []
    shared = np.mean([pairs_of(plan_epoch(lengths, budget, s, 0, "planned")) for s in range(20)])
    chance = shared**2 / (documents * (documents - 1) / 2)
    for fill in sorted(fills):
        least = bound.least_meetings(100 * lengths.sum() / budget / fill)
        row = {"lengths": name, "documents": documents, "budget_over_mean": multiple, "fill": fill}
        row |= {"chance": chance, "pairs_again": least, "over_chance": least / chance}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", choices=["gsm8k", "lognormal"], help="one set, not all")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--budget-multiple", type=float, default=2, help="budget in mean lengths")
    parser.add_argument("--fills", type=float, nargs="+", default=[96.74])
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    cases = CASES
    if args.lengths:
        cases = [(args.lengths, args.documents, args.budget_multiple, args.fills)]
    rows = [row for case in cases for row in bounds_of(*case)]
    write_record({**header("order bound"), "rows": rows}, args.record)


if __name__ == "__main__":
    main()
