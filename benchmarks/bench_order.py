"""Does the place of a document depend on its length, or on the place it had before?

    python benchmarks/bench_order.py [--record FILE] [--seeds 20] [--largest 200000]
        [--ways planned balanced stream] [--before FOLDER]

For sets of 50 to 200,000 documents and budgets of 2 to 30 mean lengths, over seeds: the rank
correlation of a document's place (the index of its pack) with its length, with its place in the
next epoch, and with its place under the next seed; how often documents that shared a pack share
one in the next epoch, relative to chance; and the fill. "forced" is the same ratio for
packs of documents in random order, cut where the next one does not fit: what the lengths alone
enforce. Streams are measured as one shard without a shuffle block, in the order of a new shuffle.

With `--before`, a checkout of an earlier version, its planner is measured too, "planned", and the
fill of streams of the mixes of bench_packing. The calls whose CPU seconds are compared alternate.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from nopad.packing import Plan, Planner, pack_lengths
from nopad.packing.ordering import permute, shuffle_key
from nopad.packing.planning import balance_plan
from nopad.packing.readers import PLANNED_POOL
from packing_mixes import mixes
from record import header, shared_dir, write_record

BUDGETS = (2, 3, 4, 10, 30)
SIZES = (50, 600, 2000, 7473, 200_000)
WAYS = ("planned", "balanced", "stream")
PackLengths = Callable[..., Plan]


def gsm8k_lengths(count: int) -> np.ndarray:
    """Return half the bytes of question and answer, about the tokens of a small vocabulary."""
    path = shared_dir() / "data/gsm8k/train.jsonl"
    with path.open(encoding="utf8") as file:
        rows = [json.loads(line) for line in file]
    lengths = np.array([len(row["question"] + row["answer"]) // 2 for row in rows])
    return np.resize(lengths, count)


def lognormal_lengths(count: int) -> np.ndarray:
    samples = np.random.default_rng(5).lognormal(np.log(350), 1.1, count)
    return np.maximum(samples, 1).astype(np.int64)


def load_before(folder: Path) -> PackLengths:
    """Return `pack_lengths` of another checkout, beside the installed one."""
    spec = importlib.util.spec_from_file_location("nopad_before", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["nopad_before"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nopad_before"])
    return importlib.import_module("nopad_before.packing").pack_lengths


def seconds_of(
    versions: list[PackLengths], lengths: np.ndarray, budget: int, pool: int = 1024
) -> list[float]:
    """Return the median CPU seconds of `pack_lengths` in each version; the calls alternate."""
    repeats = min(200, 5 + 200_000 // len(lengths))
    times: list[list[float]] = [[] for _ in versions]
    for _ in range(repeats):
        for version, runs in zip(versions, times, strict=True):
            start = time.process_time()
            version(lengths, budget, pool=pool)
            runs.append(time.process_time() - start)
    return [round(statistics.median(runs), 6) for runs in times]


def compare_mixes(before: PackLengths) -> list[dict]:
    """Compare fill and seconds of two versions, for streams of the mixes of bench_packing."""
    rows = []
    for mix in mixes(200_000):
        fills = [
            round(version(mix.lengths, mix.budget).fill(mix.budget) * 100, 3)
            for version in (before, pack_lengths)
        ]
        seconds = seconds_of([before, pack_lengths], mix.lengths, mix.budget)
        row = {"mix": mix.name, "budget": mix.budget, "fill": fills[1], "seconds": seconds[1]}
        rows.append(row | {"before": {"fill": fills[0], "seconds": seconds[0]}})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def plan_epoch(
    lengths, budget: int, seed: int, epoch: int, way: str, version: PackLengths = pack_lengths
) -> list[np.ndarray]:
    """Return the documents of each pack of an epoch."""
    order = permute(np.arange(len(lengths)), len(lengths), shuffle_key("epoch", seed, epoch, ""))
    if way == "random":
        plan = pack_lengths(lengths[order], budget, strategy="sequential")
    elif way == "stream":
        plan = pack_lengths(lengths[order], budget)
    else:
        plan = version(lengths[order], budget, pool=PLANNED_POOL)
    if way == "balanced":
        plan = balance_plan(plan, seed=2 * seed + epoch)
    return [order[pack] for pack in plan]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def places(packs: list[np.ndarray], count: int) -> np.ndarray:
    """Return the index of each document's pack."""
    found = np.empty(count, np.int64)
    found[np.concatenate(packs)] = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    return found


def shared_pairs(packs: list[np.ndarray], place: np.ndarray) -> tuple[int, float]:
    """Count the pairs that share a pack now and in `place`, and how many chance would give."""
    keys = np.concatenate([pack * 0 + i for i, pack in enumerate(packs)]) * (place.max() + 1)
    again = np.unique(keys + place[np.concatenate(packs)], return_counts=True)[1]
    count = len(place)
    pairs, next_pairs = (
        float((sizes * (sizes - 1) // 2).sum())
        for sizes in (np.array([len(pack) for pack in packs]), np.bincount(place))
    )
    return int((again * (again - 1) // 2).sum()), pairs * next_pairs / (count * (count - 1) / 2)


def measure(
    lengths: np.ndarray, budget: int, way: str, seeds: int, version: PackLengths = pack_lengths
) -> dict:
    """Measure one set with one budget, over seeds."""
    count = len(lengths)
    length, epoch, seed_pairs, fills, previous = [], [], [], [], None
    again = expected = 0.0
    for seed in range(seeds):
        packs, later = (
            plan_epoch(lengths, budget, seed, number, way, version) for number in (0, 1)
        )
        place, next_place = places(packs, count), places(later, count)
        length.append(correlation(lengths, place))
        epoch.append(correlation(place, next_place))
        if previous is not None:
            seed_pairs.append(correlation(previous, place))
        previous = place
        both, chance = shared_pairs(packs, next_place)
        again, expected = again + both, expected + chance
        fills.append(100 * int(lengths.sum()) / budget / len(packs))
    return {
        "seeds_measured": seeds,
        "packs": len(packs),
        **_mean_and_error("length", length),
        **_mean_and_error("epochs", epoch),
        **_mean_and_error("seeds", seed_pairs),
        "again_over_chance": round(again / expected, 2) if expected else None,
        "fill": round(float(np.mean(fills)), 3),
    }


def _mean_and_error(name: str, values: list[float]) -> dict[str, float]:
    error = float(np.std(values) / len(values) ** 0.5)
    return {name: round(float(np.mean(values)), 4), f"{name}_error": round(error, 4)}


def passes(row: dict) -> bool:
    """Return whether no mean correlation exceeds 0.02 or three standard errors."""
    return all(
        abs(row[name]) <= max(0.02, 3 * row[f"{name}_error"])
        for name in ("length", "epochs", "seeds")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--seeds", type=int, default=20, help="fewer from 2,000 documents on")
    parser.add_argument("--largest", type=int, default=200_000, help="documents of the largest set")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--before", type=Path, help="checkout of an earlier version, to compare")
    args = parser.parse_args()
    before = load_before(args.before) if args.before else None
    rows = []
    for name, draw in (("gsm8k", gsm8k_lengths), ("lognormal", lognormal_lengths)):
        for count in (size for size in SIZES if size <= args.largest):
            lengths, seeds = draw(count), min(args.seeds, max(4, 2000 * args.seeds // count))
            for multiple in BUDGETS:
                budget = int(lengths.mean() * multiple)
                capped = np.minimum(lengths, budget)
                if capped.sum() < 10 * budget:
                    continue
                row = {"lengths": name, "documents": count, "budget_over_mean": multiple}
                for way in args.ways:
                    row |= {"way": way, **measure(capped, budget, way, seeds)}
                    if before and way == "planned":
                        row["before"] = measure(capped, budget, way, seeds, before)
                        row["before"]["seconds"], row["seconds"] = seconds_of(
                            [before, pack_lengths], capped, budget, PLANNED_POOL
                        )
                    rows.append(row | {"passes": passes(row)})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                forced = measure(capped, budget, "random", seeds)
                for row in rows[-len(args.ways) :]:
                    row["forced_over_chance"] = forced["again_over_chance"]
    version = Planner(1).state_dict()["version"]
    record = {**header("order"), "planner_version": version, "seeds": args.seeds, "rows": rows}
    if before:
        record["mixes"] = compare_mixes(before)
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
