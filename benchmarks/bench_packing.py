"""Fill rate and speed of packing, beside seqpacker, TRL and Grain.

    python benchmarks/bench_packing.py [--quick] [--record FILE.json]

    planning     documents per CPU second and fill rate, from lengths only, on easy and hard mixes:
                 ours in a stream (pool 1024), seqpacker in buffers of 1024, and as the offline
                 reference seqpacker's best-fit decreasing over the full set
    end to end   memory-mapped tokens to packed numpy rows, many per array and one by one as Packs,
                 beside TRL's pack_dataset and Grain's BestFit with 1024 bins; the upper limit is
                 copying the tokens. Also from a datasets.Dataset, beside only reading its rows
    a row        read and collated for a trainer, with natural and with fixed shapes, beside
                 Transformers' flattening collator

All times are CPU times of this process: the median of several runs after a warm-up run, with the
peers alternating. Needs the extra `bench`. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from nopad.collators import PackedCollator
from nopad.packing import Pack, PackedDataset, Plan, Planner
from nopad.packing.readers import PlannedPacks
from packing_mixes import Mix, mixes
from packing_peers import (
    arrow_rows,
    flatten_packs,
    grain_packs,
    read_rows,
    seqpacker_buffers,
    trl_packs,
)
from record import header, write_record

FEED_SIZE = 16_384
"""Lengths per call of our planner."""
EOS = 0


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each call; after one warm-up round, the calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if round_index:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(runs) for name, runs in times.items()}


def stream_plans(lengths: np.ndarray, budget: int, feed: int = FEED_SIZE) -> Iterator[Plan]:
    """Plan a stream with our planner."""
    planner = Planner(budget)
    for start in range(0, len(lengths), feed):
        yield planner.feed(lengths[start : start + feed])
    yield planner.finish()


def bench_planning(all_mixes: list[Mix], repeats: int) -> list[dict]:
    rows = []
    for mix in all_mixes:
        lengths, budget = mix.lengths, mix.budget
        seconds = alternate(
            {
                "ours": lambda lengths=lengths, budget=budget: sum(
                    map(len, stream_plans(lengths, budget))
                ),
                "seqpacker": lambda lengths=lengths, budget=budget: seqpacker_buffers(
                    lengths, budget, 1024
                ),
            },
            repeats,
        )
        plan = Plan.join(list(stream_plans(lengths, budget)))
        assert np.array_equal(np.sort(plan.items), np.arange(len(lengths)))
        assert plan.tokens.max() <= budget
        packs = {
            "ours": len(plan),
            "seqpacker": seqpacker_buffers(lengths, budget, 1024),
            "offline": seqpacker_buffers(lengths, budget, len(lengths)),
            "bound": -(-int(lengths.sum()) // budget),
        }
        fill = {name: 100 * lengths.sum() / (budget * n) for name, n in packs.items()}
        rows.append(
            {
                "mix": mix.name,
                "budget": budget,
                "easy": mix.easy,
                "ours_docs_s": len(lengths) / seconds["ours"],
                "seqpacker_docs_s": len(lengths) / seconds["seqpacker"],
                "times": seconds["seqpacker"] / seconds["ours"],
                "fill": fill,
                "to_offline": fill["ours"] - fill["offline"],
            }
        )
    return rows


def show_planning(rows: list[dict]) -> None:
    print(
        "\nplanning: documents per CPU second and fill, lengths only, at most 1024 documents pooled"
    )
    columns = ("mix", "budget", "ours", "seqpk", "ratio", "fill %", "seqpk %", "offline %", "diff")
    print("{:19}{:>7}{:>9}{:>9}{:>7}{:>9}{:>9}{:>10}{:>8}".format(*columns))
    for row in rows:
        fill = row["fill"]
        print(
            f"{row['mix']:19}{row['budget']:7}{row['ours_docs_s'] / 1e6:8.1f}M"
            f"{row['seqpacker_docs_s'] / 1e6:8.1f}M{row['times']:6.1f}x{fill['ours']:9.3f}"
            f"{fill['seqpacker']:9.3f}{fill['offline']:10.3f}{row['to_offline']:+8.3f}"
        )


def token_file(lengths: np.ndarray, path: Path) -> np.ndarray:
    """Write documents of these lengths as flat uint16 tokens; each ends with EOS."""
    flat = np.random.default_rng(0).integers(1, 50_000, lengths.sum(), dtype=np.uint16)
    flat[np.cumsum(lengths) - 1] = EOS
    flat.tofile(path)
    return flat


def bench_end_to_end(mix: Mix, repeats: int, peer_docs: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        flat = token_file(mix.lengths, path)
        start = time.process_time()
        data = PackedDataset(path, budget=mix.budget, dtype="uint16", add_eos=EOS, epochs=None)
        opened = time.process_time() - start
        rows = data.count()
        stream, collate = iter(data), PackedCollator()
        fixed = PackedCollator(fixed_sequences=512)
        few = mix.lengths[:peer_docs]
        arrow = arrow_rows(flat[: few.sum()], few)
        from_arrow = PackedDataset(arrow, budget=mix.budget, epochs=None)
        arrow_stream, arrow_packs = iter(from_arrow), from_arrow.count()
        calls: dict[str, Callable[[], object]] = {
            "rows": lambda: build_rows(data),
            "packs": lambda: consume(stream, rows, lambda pack: pack),
            "collated": lambda: consume(stream, rows, collate),
            "fixed": lambda: consume(stream, rows, fixed),
            "copy": lambda: copy_tokens(flat),
        }
        seconds = alternate(calls, repeats)
        peers = alternate(
            {
                "TRL": lambda: trl_packs(flat[: few.sum()], few, mix.budget),
                "Grain": lambda: grain_packs(flat[: few.sum()], few, mix.budget),
                "HF collator": lambda: flatten_packs(stream, 200),
                "datasets": lambda: consume(arrow_stream, arrow_packs, lambda pack: pack),
                "datasets alone": lambda: read_rows(arrow),
            },
            1,
        )
    speed = {name: len(mix.lengths) / taken for name, taken in seconds.items()}
    speed |= {name: len(few) / taken for name, taken in peers.items() if name != "HF collator"}
    return {
        "mix": mix.name,
        "budget": mix.budget,
        "docs_s": speed,
        "row_us": {
            **{name: 1e6 * seconds[name] / rows for name in ("rows", "packs", "collated", "fixed")},
            "HF collator": 1e6 * peers["HF collator"] / 200,
        },
        "open_s": opened,
        "times_trl": speed["packs"] / speed["TRL"],
        "times_grain": speed["packs"] / speed["Grain"],
    }


def consume(stream: Iterator[Pack], count: int, use: Callable[[Pack], object]) -> None:
    """Use the next packs one by one, without keeping them, as a training loop does."""
    for pack in islice(stream, count):
        use(pack)


def build_rows(data: PackedDataset, tokens_per_array: int = 1 << 17) -> None:
    """Plan an epoch and write its packs as rows of arrays."""
    packs = data.reader
    assert isinstance(packs, PlannedPacks)
    step = max(1, tokens_per_array // packs.settings.budget)
    for plan in packs.plans(0):
        for first in range(0, len(plan), step):
            packs.store.gather(plan, np.arange(first, min(first + step, len(plan))))


def copy_tokens(flat: np.ndarray) -> None:
    """Copy all tokens to int64, into one row that stays in the CPU cache."""
    row = np.empty(8192, np.int64)
    for start in range(0, len(flat) - 8192, 8192):
        row[:] = flat[start : start + 8192]


def show_end_to_end(rows: list[dict]) -> None:
    print("\nend to end: memory-mapped tokens to packed numpy rows, documents per CPU second")
    columns = ("mix", "budget", "rows", "Packs", "TRL", "Grain", "vs TRL", "vs Grain", "copy")
    print("{:19}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}".format(*columns))
    for row in rows:
        speed = row["docs_s"]
        print(
            f"{row['mix']:19}{row['budget']:7}{speed['rows'] / 1e3:8.0f}k"
            f"{speed['packs'] / 1e3:8.0f}k{speed['TRL'] / 1e3:8.1f}k{speed['Grain'] / 1e3:8.1f}k"
            f"{row['times_trl']:8.1f}x{row['times_grain']:9.1f}x{speed['copy'] / 1e3:8.0f}k"
        )
    for row in rows:
        us = row["row_us"]
        print(
            f"a row of {row['budget']}: in an array {us['rows']:.1f} us, as a Pack "
            f"{us['packs']:.1f}, read and collated {us['collated']:.1f}, in fixed shapes "
            f"{us['fixed']:.1f}; Transformers' flattening collator {us['HF collator']:.0f}"
        )
        speed = row["docs_s"]
        print(
            f"  from a datasets.Dataset {speed['datasets'] / 1e3:.0f}k documents per second; "
            f"datasets alone reads {speed['datasets alone'] / 1e3:.0f}k"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer documents and runs")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    docs, repeats = (20_000, 2) if args.quick else (200_000, 7)
    all_mixes = mixes(docs)
    record = {
        **header("packing"),
        "docs": docs,
        "runs": repeats,
        "load": round(os.getloadavg()[0], 1),
        "planning": bench_planning(all_mixes, repeats),
        "end_to_end": [bench_end_to_end(m, 3, min(docs, 20_000)) for m in all_mixes if m.easy],
    }
    show_planning(record["planning"])
    show_end_to_end(record["end_to_end"])
    write_record(record, args.record)
    print(json.dumps(record, default=float))


if __name__ == "__main__":
    main()
