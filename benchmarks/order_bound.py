"""How often must documents meet again, where packs have to be full?

    python benchmarks/order_bound.py [--record FILE]
    python benchmarks/order_bound.py --case gsm8k 600 2 97.5 [--case ...] [--groups 40]

A case: lengths, documents, budget in mean lengths, fill in percent. A planner that shuffles puts
documents i and j together with a probability p_ij, so the expected number of pairs that meet in
two epochs is the sum of p_ij². This computes a lower bound to it for an expected number K of packs
and every planner that draws its epochs independently. x_S: how often the pack S occurs.

    minimise    Σ p_ij²      p_ij: the sum of x_S over the packs of both
    subject to  Σ x_S = 1 over the packs of each document, and Σ x_S <= K over all

    dual        Σ u_i - λ K - Σ w_ij² / 4
    if          Σ u_i - Σ w_ij <= λ over the documents and the pairs of each pack

Any u and w >= 0 give a bound, once each u is lowered by what the packs exceed λ in which it is the
longest. A depth-first search finds that exactly. The minimum over the packs found so far suggests u
and w = 2 p; packs that exceed λ are added. Documents of one length share their u. Where lengths
are more than `--groups`, the pairs of two groups of similar lengths share their w, as if they met
equally often: that lowers the bound.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np
from bench_order import gsm8k_lengths, lognormal_lengths, plan_epoch
from numba import njit
from record import header, write_record
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

LENGTHS = {"gsm8k": gsm8k_lengths, "lognormal": lognormal_lengths}
CASES = [
    *(("gsm8k", 600, 2, fill) for fill in (90, 93, 95, 96.5, 97.5)),
    ("gsm8k", 50, 2, 92.17),
    ("gsm8k", 50, 3, 97.62),
    ("lognormal", 50, 2, 96.27),
    ("lognormal", 50, 3, 93.07),
    ("lognormal", 600, 2, 99.37),
]
SEARCHED = 300_000
"""Nodes of a search, after which packs count as if only the pairs of the longest did."""
RHO, ROUNDS, CLOSE = 2.0, 120, 0.003
"""Weight of the augmented Lagrangian; rounds; relative distance to the minimum where these end."""


@njit
def best_packs(sizes, counts, budget, u, w, limit):
    """Return, by the length of the longest, the largest Σu - Σw over packs, and these packs.

    Sums up to `limit` need not be exact. A pack is a row of indices of lengths, -1 after the last.
    """
    n, documents = len(sizes), counts.sum()
    sums, packs = u.copy(), np.full((n, budget // sizes[0] + 1), -1)
    item, after = np.empty(documents, np.int64), np.empty(documents, np.int64)
    bound = np.zeros((documents + 1, budget + 1))
    chosen, room = np.empty(documents, np.int64), np.empty(documents + 1, np.int64)
    value = np.empty(documents + 1)
    for longest in range(n):
        space, m = budget - sizes[longest], 0
        for c in range(longest, -1, -1):
            if sizes[c] <= space and u[c] > w[longest, c]:
                copies = min(counts[c] - (c == longest), space // sizes[c])
                item[m : m + copies], after[m : m + copies] = c, m + copies
                m += copies
        bound[m, : space + 1] = 0
        for i in range(m - 1, -1, -1):  # a knapsack, as if only pairs of the longest had a w
            size, gain = sizes[item[i]], u[item[i]] - w[longest, item[i]]
            for r in range(space + 1):
                bound[i, r] = bound[i + 1, r]
                if r >= size:
                    bound[i, r] = max(bound[i, r], bound[i + 1, r - size] + gain)
        best, depth, i, nodes = max(limit, u[longest]), 0, 0, 0
        value[0], room[0] = u[longest], space
        while nodes < SEARCHED:
            nodes += 1
            if i < m and value[depth] + bound[i, room[depth]] > best:
                if sizes[item[i]] > room[depth]:
                    i = after[i]
                    continue
                gain = u[item[i]] - w[longest, item[i]]
                for k in range(depth):
                    gain -= w[item[chosen[k]], item[i]]
                chosen[depth], value[depth + 1] = i, value[depth] + gain
                room[depth + 1] = room[depth] - sizes[item[i]]
                depth, i = depth + 1, i + 1
                if value[depth] > best:
                    best = sums[longest] = value[depth]
                    packs[longest, 0], packs[longest, 1:] = longest, -1
                    for k in range(depth):
                        packs[longest, k + 1] = item[chosen[k]]
            elif depth > 0:
                depth -= 1
                i = after[chosen[depth]]
            else:
                break
        if nodes == SEARCHED:
            sums[longest] = u[longest] + bound[0, space]
    return sums, packs


class MeetingBound:
    """The problem of a set of lengths, with the packs found so far."""

    def __init__(self, lengths: np.ndarray, budget: int, groups: int):
        self.sizes, self.counts = np.unique(lengths, return_counts=True)
        self.budget, n = budget, len(self.sizes)
        group = np.arange(n)
        if n > groups:
            middles = np.cumsum(self.counts) - self.counts / 2
            group = (groups * middles / len(lengths)).astype(int)
        self.cells = np.maximum.outer(group, group) * n + np.minimum.outer(group, group)
        """The cell of two lengths: a pair of groups."""
        pairs = np.outer(self.counts, self.counts) / 2 - np.diag(self.counts) / 2
        fits = np.add.outer(self.sizes, self.sizes) <= budget
        self.pairs = np.bincount(self.cells[fits], pairs[fits], minlength=n * n)
        """Pairs of documents in each cell that fit a pack."""
        self.packs: dict[tuple[int, ...], None] = {}
        self.x = np.zeros(0)
        self.u, self.limit = self.sizes / budget, 1.0
        self.add((i,) for i in range(n))
        self.add((i, j) for i in range(n) for j in range(i) if fits[i, j])
        self.add((i, i) for i in range(n) if fits[i, i] and self.counts[i] > 1)

    def add(self, packs: Iterable[tuple[int, ...]]) -> None:
        """Add packs, each the indices of its lengths."""
        self.packs |= dict.fromkeys(packs)

    def add_plan(self, plan: list[np.ndarray], lengths: np.ndarray) -> None:
        """Add the packs of an epoch."""
        found = (np.sort(np.searchsorted(self.sizes, lengths[pack]))[::-1] for pack in plan)
        self.add(tuple(pack.tolist()) for pack in found)

    def _matrices(self) -> tuple[csr_matrix, csr_matrix]:
        """Return how often each pack has each length, and how often pairs of each cell."""
        members = [(i, k) for k, pack in enumerate(self.packs) for i in pack]
        pairs = [
            (self.cells[i, j], k)
            for k, pack in enumerate(self.packs)
            for i, j in combinations(pack, 2)
        ]
        return tuple(
            csr_matrix((np.ones(len(found)), np.array(found).T), (rows, len(self.packs)))
            for found, rows in ((members, len(self.sizes)), (pairs, self.pairs.size))
        )

    def _improve(self, packs: float, contains: csr_matrix, meets: csr_matrix) -> np.ndarray:
        """Take a few steps towards the minimum over the known packs; return the w of each cell."""
        x = np.append(self.x, np.zeros(contains.shape[1] - len(self.x)))
        scale = 1 / np.maximum(self.pairs, 0.5)
        for _ in range(4):
            u, limit = self.u, self.limit

            def lagrangian(x, u=u, limit=limit):
                met, short = meets @ x, u / RHO + self.counts - contains @ x
                over = max(0.0, limit / RHO + x.sum() - packs)
                value = met @ (met * scale) + RHO / 2 * (short @ short + over**2)
                slope = meets.T @ (2 * met * scale) - RHO * (contains.T @ short) + RHO * over
                return value, slope

            options = {"maxiter": 150, "maxcor": 20}
            bounds = [(0, None)] * len(x)
            x = minimize(
                lagrangian, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options
            ).x
            self.u = u + RHO * (self.counts - contains @ x)
            self.limit = max(0.0, limit + RHO * (x.sum() - packs))
        self.x = x
        return 2 * (meets @ x) * scale

    def least_meetings(self, packs: float) -> tuple[float, float]:
        """Return a lower bound on the expected number of pairs that meet again.

        The second value is the minimum over the packs found, which the bound approaches.
        """
        best = minimum = 0.0
        for _ in range(ROUNDS):
            w = self._improve(packs, *self._matrices())
            sums, found = best_packs(
                self.sizes, self.counts, self.budget, self.u, w[self.cells], self.limit
            )
            excess = np.maximum(sums - self.limit, 0)
            minimum = (w**2 * self.pairs).sum() / 4
            best = max(best, self.counts @ (self.u - excess) - self.limit * packs - minimum)
            self.add(tuple(row[row >= 0].tolist()) for row in found if row[0] >= 0)
            if best > (1 - CLOSE) * minimum:
                break
        return best, minimum


def pairs_of(packs: list[np.ndarray]) -> int:
    """Count the pairs that share a pack."""
    return sum(len(pack) * (len(pack) - 1) // 2 for pack in packs)


def bound_of(name: str, documents: int, multiple: float, fill: float, groups: int) -> dict:
    """Compute the bound of one case, relative to chance."""
    lengths = LENGTHS[name](documents)
    budget = int(lengths.mean() * multiple)
    lengths = np.minimum(lengths, budget)
    bound = MeetingBound(lengths, budget, groups)
    plans = [plan_epoch(lengths, budget, seed, 0, "planned") for seed in range(20)]
    for plan in plans:
        bound.add_plan(plan, lengths)
    chance = np.mean([pairs_of(plan) for plan in plans]) ** 2 / (documents * (documents - 1) / 2)
    least, minimum = bound.least_meetings(100 * lengths.sum() / budget / fill)
    return {
        "lengths": name,
        "documents": documents,
        "budget_over_mean": multiple,
        "fill": fill,
        "groups": min(groups, len(bound.sizes)),
        "chance": chance,
        "pairs_again": least,
        "over_chance": least / chance,
        "minimum_over_chance": minimum / chance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("LENGTHS", "DOCUMENTS", "MULTIPLE", "FILL")
    parser.add_argument("--case", nargs=4, action="append", metavar=names, help="instead of all")
    parser.add_argument("--groups", type=int, default=400, help="groups of lengths")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    rows = []
    for name, documents, multiple, fill in args.case or CASES:
        rows.append(bound_of(name, int(documents), float(multiple), float(fill), args.groups))
        print(json.dumps(rows[-1]), flush=True)
    write_record({**header("order bound"), "rows": rows}, args.record)


if __name__ == "__main__":
    main()
