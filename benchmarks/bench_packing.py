"""How full, how fast and how level packs are, beside seqpacker, TRL and Grain in one process.

    python benchmarks/bench_packing.py [--quick] [--plot FILE.png] [--record FILE.json]

    planning     documents per CPU second and share of the budget filled, lengths only, on easy and
                 hard mixes; ours in a stream (pool 1024), seqpacker in buffers of 1024; beside
                 them best-fit decreasing over the whole set (seqpacker's), the offline mark
    delay        how many documents arrive between a document and its pack; order bias
    end to end   memory-mapped tokens to packed numpy rows, many in one array and one by one as
                 Packs, beside TRL's pack_dataset and Grain's BestFit with 1024 bins; the ceiling is
                 copying the tokens; and from the rows of a datasets.Dataset, beside reading them
    a row        read and collated for a trainer, as it is and in fixed shapes, beside Transformers'
                 flattening collator
    levelling    time of the slowest rank over the mean, 8 and 64 ranks
    memory       resident set over ten million documents, planned and read

All times are CPU time of this process, median of several runs after a first one, peers and ours in
turn. Needs the extra `bench`. Prints tables, and one JSON line last.
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
from nopad.packing.ordering import Position, Share
from nopad.packing.planning import Cost, balance_plan
from nopad.packing.readers import PlannedPacks
from nopad.packing.sources import TokenArray, TokenStore
from packing_mixes import Mix, mixes, t0_lengths
from packing_peers import (
    arrow_rows,
    flattened,
    grain_packs,
    read_rows,
    seqpacker_buffers,
    trl_packs,
)
from record import head, write

FEED = 16_384
"""Lengths handed to our planner at a time."""
EOS = 0


def in_turn(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Give the median CPU seconds of each call, all run once before and then in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(runs) for name, runs in times.items()}


def streamed(lengths: np.ndarray, budget: int, feed: int = FEED) -> Iterator[Plan]:
    """Plan a stream with our planner."""
    planner = Planner(budget)
    for at in range(0, len(lengths), feed):
        yield planner.feed(lengths[at : at + feed])
    yield planner.finish()


def bench_planning(all_mixes: list[Mix], repeats: int) -> list[dict]:
    rows = []
    for mix in all_mixes:
        lengths, budget = mix.lengths, mix.budget
        seconds = in_turn(
            {
                "ours": lambda lengths=lengths, budget=budget: sum(
                    map(len, streamed(lengths, budget))
                ),
                "seqpacker": lambda lengths=lengths, budget=budget: seqpacker_buffers(
                    lengths, budget, 1024
                ),
            },
            repeats,
        )
        plan = Plan.join(list(streamed(lengths, budget)))
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
    """Points of fill behind best-fit decreasing, on uniform lengths of eight more seeds."""
    behind = []
    for seed, budget in ((seed, budget) for seed in range(8) for budget in (2048, 8192)):
        lengths = np.random.default_rng(100 + seed).integers(1, budget + 1, docs)
        packs = len(pack_lengths(lengths, budget)), seqpacker_buffers(lengths, budget, docs)
        ours, offline = (100 * lengths.sum() / (budget * n) for n in packs)
        behind.append(offline - ours)
    return {"behind_mean": np.mean(behind), "behind_most": max(behind), "sets": len(behind)}


def delay_and_bias(mix: Mix, plan: Plan) -> dict:
    """Give the delay in documents (to 16), and the rank correlation of length and place."""
    lengths = mix.lengths[:50_000]
    left = np.empty(len(lengths))
    for now, part in enumerate(streamed(lengths, mix.budget, feed=16)):
        left[part.items] = min((now + 1) * 16, len(lengths))
    delay = left - np.arange(len(lengths))
    rank = np.argsort(np.argsort(plan.lengths, kind="stable"))
    bias = np.corrcoef(rank, np.arange(len(rank)))[0, 1]
    return {"delay_mean": delay.mean(), "delay_max": delay.max(), "bias": bias}


def show_planning(rows: list[dict]) -> None:
    print("\nplanning: lengths only, at most 1024 documents held back")
    head = ("mix", "budget", "ours", "seqpk", "times", "fill %", "seqpk %", "offline %", "to it")
    print("{:19}{:>7}{:>9}{:>9}{:>7}{:>9}{:>9}{:>10}{:>8}".format(*head), end="")
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
    """Write documents of these lengths as flat uint16 tokens, each ending with EOS."""
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
            "rows": lambda: lay_rows(data),
            "packs": lambda: each(stream, rows, lambda pack: pack),
            "collated": lambda: each(stream, rows, collate),
            "fixed": lambda: each(stream, rows, fixed),
            "copy": lambda: copy_tokens(flat),
        }
        seconds = in_turn(calls, repeats)
        peers = in_turn(
            {
                "TRL": lambda: trl_packs(flat[: few.sum()], few, mix.budget),
                "Grain": lambda: grain_packs(flat[: few.sum()], few, mix.budget),
                "HF collator": lambda: flattened(stream, 200),
                "datasets": lambda: each(arrow_stream, arrow_packs, lambda pack: pack),
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


def each(stream: Iterator[Pack], count: int, use: Callable[[Pack], object]) -> None:
    """Use the next packs one by one, and let go of each, as a training loop does."""
    for pack in islice(stream, count):
        use(pack)


def lay_rows(data: PackedDataset, together: int = 1 << 17) -> None:
    """Plan an epoch and lay its packs out, about `together` tokens in one array."""
    packs = data.reader
    assert isinstance(packs, PlannedPacks)
    step = max(1, together // packs.planner["budget"])
    for plan in packs.plans(0):
        for first in range(0, len(plan), step):
            packs.store.gather(plan, np.arange(first, min(first + step, len(plan))))


def copy_tokens(flat: np.ndarray) -> None:
    """Widen all tokens into a row that stays in the cache, and nothing else."""
    row = np.empty(8192, np.int64)
    for at in range(0, len(flat) - 8192, 8192):
        row[:] = flat[at : at + 8192]


def show_end_to_end(rows: list[dict]) -> None:
    print("\nend to end: memory-mapped tokens to packed numpy rows, documents per CPU second")
    head = ("mix", "budget", "rows", "Packs", "TRL", "Grain", "to TRL", "to Grain", "copy")
    print("{:19}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}".format(*head))
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
            f"a row of {row['budget']}: laid out {us['rows']:.1f} us, as a Pack {us['packs']:.1f}, "
            f"read and collated {us['collated']:.1f}, in fixed shapes {us['fixed']:.1f}; "
            f"Transformers' flattening collator {us['HF collator']:.0f}"
        )
        speed = row["docs_s"]
        print(
            f"  from a datasets.Dataset {speed['datasets'] / 1e3:.0f}k documents a second; "
            f"datasets alone reads {speed['datasets alone'] / 1e3:.0f}k"
        )


def spread(costs: np.ndarray, ranks: int) -> float:
    """Give the time of the slowest rank over the mean, summed over all whole steps."""
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return float(steps.max(1).sum() / steps.mean(1).sum())


def bench_levelling(lengths: np.ndarray) -> list[dict]:
    sets = {"lognormal 350 1.1": lengths, "lognormal, 8 shards": lengths}
    for epochs in (1, 2, 4, 8):
        if (t0 := t0_lengths(epochs)) is not None:
            sets[f"t0, {epochs} epoch" + "s" * (epochs > 1)] = t0
    rows = []
    for name, some in sets.items():
        before = [pack_lengths(part, 8192) for part in shards(some, 8 if "shards" in name else 1)]
        behind = [balance_plan(plan, block=128 if "shards" in name else 1024) for plan in before]
        row: dict = {"set": name, "packs": sum(map(len, before))}
        for kind, cost in (("7B", Cost()), ("attention", Cost(0.0, 1.0))):
            for when, plans in (("before", before), ("behind", behind)):
                costs = dealt([cost.of_packs(plan) for plan in plans])
                row[f"{kind} {when}"] = {ranks: spread(costs, ranks) for ranks in (8, 64)}
        rows.append(row)
    return rows


def shards(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    return [lengths[shard::count] for shard in range(count)]


def dealt(costs: list[np.ndarray]) -> np.ndarray:
    """Deal the packs of shards out in turn."""
    steps = min(map(len, costs))
    return np.stack([some[:steps] for some in costs], 1).ravel()


def show_levelling(rows: list[dict]) -> None:
    print("\nlevelling: slowest rank over the mean at 8 / 64 ranks, budget 8192, no space lost")
    print("{:21}{:>7}{:>17}{:>17}{:>17}{:>17}".format(
        "set", "packs", "7B as they come", "7B levelled", "attn as it comes", "attn levelled"
    ))  # fmt: skip
    for row in rows:
        pairs = [row[f"{k} {w}"] for k in ("7B", "attention") for w in ("before", "behind")]
        text = "".join(f"{pair[8]:10.4f}/{pair[64]:.4f}" for pair in pairs)
        print(f"{row['set']:21}{row['packs']:7}{text}")


def bench_memory(samples: int) -> dict:
    """Stream samples through a planner; give the resident set after a tenth and at the end."""
    planner, rng, sizes = Planner(8192), np.random.default_rng(0), []
    for fed in range(0, samples, 65_536):
        lengths = np.clip(rng.lognormal(np.log(350), 1.1, 65_536), 1, 8192)
        planner.feed(lengths.astype(np.int64))
        if fed <= samples // 10 < fed + 65_536 or fed + 65_536 >= samples:
            sizes.append(resident_mb())
    read = bench_memory_of_reading(samples)
    return {"samples": planner.counts.items, "start_mb": sizes[0], "end_mb": sizes[-1], **read}


def bench_memory_of_reading(documents: int) -> dict:
    """Read documents as packs; give how much the resident set grew behind the first ones."""
    lengths = np.full(documents, 3, np.int32)
    lengths[::7] = 11
    shelf = TokenArray("flat", np.zeros(64, np.uint16), np.zeros(documents, np.int64), lengths)
    packs = PlannedPacks(TokenStore([shelf]), {"budget": 8192}).read(
        Position(end_epoch=1), Share(), 0
    )
    seen = sum(len(pack.samples) for pack in islice(packs, 64))
    before = resident_mb()
    seen += sum(len(pack.samples) for pack in packs)
    return {"read": seen, "grown_mb": resident_mb() - before}


def resident_mb() -> float:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def plot(all_mixes: list[Mix], path: Path) -> None:
    """Draw the fill against the number of documents held back, ours and seqpacker's buffers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pools = [2**n for n in range(5, 15)]
    chosen = [mix for mix in all_mixes if mix.name.startswith("lognormal")][:5]
    figure, axes = pyplot.subplots(1, len(chosen), figsize=(3.4 * len(chosen), 3.9), sharey=True)
    for axis, mix in zip(axes, chosen, strict=True):
        total = mix.lengths.sum() / mix.budget * 100
        ours = [total / len(pack_lengths(mix.lengths, mix.budget, pool=pool)) for pool in pools]
        flush = [total / seqpacker_buffers(mix.lengths, mix.budget, pool) for pool in pools]
        offline = total / seqpacker_buffers(mix.lengths, mix.budget, len(mix.lengths))
        axis.semilogx(pools, ours, "o-", base=2, label="nopad, streaming")
        axis.semilogx(pools, flush, "s--", base=2, label="seqpacker, buffers")
        axis.axhline(offline, color="grey", linestyle=":", label="best-fit decreasing, whole set")
        axis.set_title(f"{mix.name}, budget {mix.budget}", fontsize=9)
        axis.set_xlabel("documents held back")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(95.9, 100.1)  # one scale for all; short buffers fall below it
    axes[0].set_ylabel("share of the budget filled, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer documents and runs")
    parser.add_argument("--plot", type=Path, help="write fill against pool size to this PNG")
    parser.add_argument("--record", type=Path, help="write the JSON record to this file too")
    chosen = parser.parse_args()
    docs, repeats = (20_000, 2) if chosen.quick else (200_000, 7)
    all_mixes = mixes(docs)
    record = {
        **head("packing"),
        "docs": docs,
        "runs": repeats,
        "load": round(os.getloadavg()[0], 1),
        "memory": bench_memory(1_000_000 if chosen.quick else 10_000_000),
        "planning": bench_planning(all_mixes, repeats),
        "uniform": bench_uniform(docs),
        "levelling": bench_levelling(all_mixes[1].lengths),
        "end_to_end": [bench_end_to_end(m, 3, min(docs, 20_000)) for m in all_mixes if m.easy],
    }
    show_planning(record["planning"])
    show_end_to_end(record["end_to_end"])
    show_levelling(record["levelling"])
    memory = record["memory"]
    print(f"\nmemory: {memory['start_mb']:.0f} MB after a tenth of {memory['samples']:,} samples,")
    print(f"{memory['end_mb']:.0f} MB at the end; reading {memory['read']:,} as packs ", end="")
    print(f"grew it by {memory['grown_mb']:.1f} MB (load {record['load']})")
    if chosen.plot:
        plot(all_mixes, chosen.plot)
    write(record, chosen.record)
    print(json.dumps(record, default=float))


if __name__ == "__main__":
    main()
