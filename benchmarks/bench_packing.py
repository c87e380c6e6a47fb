"""Fill rate, speed and balance of packs, beside seqpacker, TRL and Grain.

    python benchmarks/bench_packing.py [--quick] [--plot FILE.png] [--record FILE.json]

    planning     documents per CPU second and fill rate, from lengths only, on easy and hard mixes:
                 ours in a stream (pool 1024), seqpacker in buffers of 1024, and as the offline
                 reference seqpacker's best-fit decreasing over the full set
    delay        documents that arrive between a document and its pack; correlation of length and
                 position (bias)
    end to end   memory-mapped tokens to packed numpy rows, many per array and one by one as Packs,
                 beside TRL's pack_dataset and Grain's BestFit with 1024 bins; the upper limit is
                 copying the tokens. Also from a datasets.Dataset, beside only reading its rows
    a row        read and collated for a trainer, with natural and with fixed shapes, beside
                 Transformers' flattening collator
    balance      time of the slowest rank over the mean, for 8 and 64 ranks
    memory       resident set while planning and reading ten million documents

All times are CPU times of this process: the median of several runs after a warm-up run, with the
peers alternating. Needs the extra `bench`. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from nopad.collators import PackedCollator
from nopad.packing import Pack, PackedDataset, Plan, Planner, pack_lengths
from nopad.packing.ordering import Position, RankShard
from nopad.packing.planning import Cost, balance_plan
from nopad.packing.readers import PlannedPacks
from nopad.packing.sources import TokenArray
from packing_mixes import Mix, mixes, t0_lengths
from packing_peers import (
    arrow_rows,
    flatten_packs,
    grain_packs,
    plot,
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
                **delay_and_bias(mix, plan),
            }
        )
    return rows


def bench_uniform(docs: int) -> dict:
    """Fill rate behind best-fit decreasing in percentage points, on uniform lengths, 8 seeds."""
    behind = []
    for seed, budget in ((seed, budget) for seed in range(8) for budget in (2048, 8192)):
        lengths = np.random.default_rng(100 + seed).integers(1, budget + 1, docs)
        packs = len(pack_lengths(lengths, budget)), seqpacker_buffers(lengths, budget, docs)
        ours, offline = (100 * lengths.sum() / (budget * n) for n in packs)
        behind.append(offline - ours)
    return {"behind_mean": np.mean(behind), "behind_most": max(behind), "sets": len(behind)}


def delay_and_bias(mix: Mix, plan: Plan) -> dict:
    """Return the delay in documents (in steps of 16), and the bias.

    The bias is the rank correlation of a document's length and its position in the packs.
    """
    lengths = mix.lengths[:50_000]
    packed_at = np.empty(len(lengths))
    for index, emitted in enumerate(stream_plans(lengths, mix.budget, feed=16)):
        packed_at[emitted.items] = min((index + 1) * 16, len(lengths))
    delay = packed_at - np.arange(len(lengths))
    rank = np.argsort(np.argsort(plan.lengths, kind="stable"))
    bias = np.corrcoef(rank, np.arange(len(rank)))[0, 1]
    return {"delay_mean": delay.mean(), "delay_max": delay.max(), "bias": bias}


def show_planning(rows: list[dict]) -> None:
    print(
        "\nplanning: documents per CPU second and fill, lengths only, at most 1024 documents pooled"
    )
    columns = ("mix", "budget", "ours", "seqpk", "ratio", "fill %", "seqpk %", "offline %", "diff")
    print("{:19}{:>7}{:>9}{:>9}{:>7}{:>9}{:>9}{:>10}{:>8}".format(*columns), end="")
    print("{:>16}{:>9}".format("delay mean/max", "bias"))
    for row in rows:
        fill = row["fill"]
        print(
            f"{row['mix']:19}{row['budget']:7}{row['ours_docs_s'] / 1e6:8.1f}M"
            f"{row['seqpacker_docs_s'] / 1e6:8.1f}M{row['times']:6.1f}x{fill['ours']:9.3f}"
            f"{fill['seqpacker']:9.3f}{fill['offline']:10.3f}{row['to_offline']:+8.3f}"
            f"{row['delay_mean']:9.0f}/{row['delay_max']:<6.0f}{row['bias']:+9.4f}"
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


def spread(costs: np.ndarray, ranks: int) -> float:
    """Return the time of the slowest rank over the mean, summed over all complete steps."""
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return float(steps.max(1).sum() / steps.mean(1).sum())


def bench_balance(lengths: np.ndarray) -> list[dict]:
    sets = {"lognormal 350 1.1": lengths, "lognormal, 8 shards": lengths}
    for epochs in (1, 2, 4, 8):
        if (t0 := t0_lengths(epochs)) is not None:
            sets[f"t0, {epochs} epoch" + "s" * (epochs > 1)] = t0
    rows = []
    for name, set_lengths in sets.items():
        num_shards, block = (8, 128) if "shards" in name else (1, 1024)
        before = [pack_lengths(set_lengths[i::num_shards], 8192) for i in range(num_shards)]
        balanced = [balance_plan(plan, block=block) for plan in before]
        row: dict = {"set": name, "packs": sum(map(len, before))}
        for model, cost in (("7B", Cost()), ("attention", Cost(0.0, 1.0))):
            for stage, plans in (("before", before), ("behind", balanced)):
                costs = interleave([cost.of_packs(plan) for plan in plans])
                row[f"{model} {stage}"] = {ranks: spread(costs, ranks) for ranks in (8, 64)}
        rows.append(row)
    return rows


def interleave(costs: list[np.ndarray]) -> np.ndarray:
    """Take one pack of each shard in turn."""
    steps = min(map(len, costs))
    return np.stack([shard[:steps] for shard in costs], 1).ravel()


def show_balance(rows: list[dict]) -> None:
    print("\nbalance: slowest rank over the mean for 8 / 64 ranks, budget 8192, same fill")
    print("{:21}{:>7}{:>17}{:>17}{:>17}{:>17}".format(
        "set", "packs", "7B unbalanced", "7B balanced", "attn unbalanced", "attn balanced"
    ))  # fmt: skip
    for row in rows:
        pairs = [row[f"{k} {w}"] for k in ("7B", "attention") for w in ("before", "behind")]
        text = "".join(f"{pair[8]:10.4f}/{pair[64]:.4f}" for pair in pairs)
        print(f"{row['set']:21}{row['packs']:7}{text}")


def bench_memory(samples: int) -> dict:
    """Stream samples through a planner; return the resident set after a tenth and at the end."""
    planner, rng, sizes = Planner(8192), np.random.default_rng(0), []
    for fed in range(0, samples, 65_536):
        lengths = np.clip(rng.lognormal(np.log(350), 1.1, 65_536), 1, 8192)
        planner.feed(lengths.astype(np.int64))
        if fed <= samples // 10 < fed + 65_536 or fed + 65_536 >= samples:
            sizes.append(resident_mb())
    read = bench_memory_of_reading(samples)
    return {"samples": planner.counts.items, "start_mb": sizes[0], "end_mb": sizes[-1], **read}


def bench_memory_of_reading(documents: int) -> dict:
    """Read documents as packs; return how much the resident set grew after the first ones."""
    lengths = np.full(documents, 3, np.int32)
    lengths[::7] = 11
    tokens = TokenArray("flat", np.zeros(64, np.uint16), np.zeros(documents, np.int64), lengths)
    packs = PackedDataset(tokens, budget=8192).reader.read(Position(end_epoch=1), RankShard(), 0)
    count = sum(len(pack.samples) for pack in islice(packs, 64))
    before = resident_mb()
    count += sum(len(pack.samples) for pack in packs)
    return {"read": count, "grown_mb": resident_mb() - before}


def resident_mb() -> float:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer documents and runs")
    parser.add_argument(
        "--plot", type=Path, help="plot the fill rate over the pool size to this PNG"
    )
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    docs, repeats = (20_000, 2) if args.quick else (200_000, 7)
    all_mixes = mixes(docs)
    record = {
        **header("packing"),
        "docs": docs,
        "runs": repeats,
        "load": round(os.getloadavg()[0], 1),
        "memory": bench_memory(1_000_000 if args.quick else 10_000_000),
        "planning": bench_planning(all_mixes, repeats),
        "uniform": bench_uniform(docs),
        "levelling": bench_balance(all_mixes[1].lengths),
        "end_to_end": [bench_end_to_end(m, 3, min(docs, 20_000)) for m in all_mixes if m.easy],
    }
    show_planning(record["planning"])
    show_end_to_end(record["end_to_end"])
    show_balance(record["levelling"])
    memory = record["memory"]
    print(
        f"\nmemory: planning {memory['samples']:,} samples, {memory['start_mb']:.0f} MB after a "
        f"tenth and {memory['end_mb']:.0f} MB at the end; reading {memory['read']:,} as packs "
        f"added {memory['grown_mb']:.1f} MB (load average {record['load']})"
    )
    if args.plot:
        plot(all_mixes, args.plot)
    write_record(record, args.record)
    print(json.dumps(record, default=float))


if __name__ == "__main__":
    main()
