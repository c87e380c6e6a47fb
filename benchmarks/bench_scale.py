"""What planning costs one rank of many, for sets of 10^6 documents and more.

    python benchmarks/bench_scale.py [--record FILE] [--documents 1e6 1e7 1e8] [--ranks 512]

Every rank plans the whole epoch and reads its own packs. A set is a Megatron index with log-normal
lengths, mean 600 tokens, over a token file that is a hole of the same size: tokens are not read
from a disk. One rank opens it in a process of its own and reports: seconds to open it, seconds and
documents per second to plan the epoch, the memory that the process has for itself (anonymous; the
index is mapped, and shared by the ranks of a machine), seconds to the first pack after a resume in
the middle and at the end of the epoch, and bytes of the state. Times are those of one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BUDGET, CHUNK = 8192, 1 << 22


def write_set(prefix: Path, documents: int) -> None:
    """Write an index of this many documents, and a token file that occupies no disk."""
    rng, position = np.random.default_rng(0), 0
    index = Path(f"{prefix}.idx")
    with index.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08")
        file.write(np.array([documents, documents + 1], "<u8").tobytes())
    chunks = [min(CHUNK, documents - first) for first in range(0, documents, CHUNK)]
    lengths_at, offsets_at = 34, 34 + 4 * documents
    with index.open("r+b") as file:
        for count in chunks:
            lengths = np.clip(rng.lognormal(5.9, 1.0, count), 8, 65536).astype("<i4")
            ends = position + np.cumsum(lengths, dtype=np.int64)
            file.seek(lengths_at)
            file.write(lengths.tobytes())
            file.seek(offsets_at)
            file.write((2 * np.concatenate([[position], ends[:-1]])).astype("<i8").tobytes())
            lengths_at, offsets_at = lengths_at + 4 * count, offsets_at + 8 * count
            position = int(ends[-1])
        file.seek(offsets_at)
        for first in range(0, documents + 1, CHUNK):
            file.write(np.arange(first, min(first + CHUNK, documents + 1), dtype="<i8").tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * position)


def own_memory() -> float:
    """Return the MB that this process shares with no other and could not give back."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("smaps_rollup has no Anonymous line")


def measure(prefix: str, rank: int, ranks: int) -> dict:
    """Open the set as one rank, plan the epoch, resume in it."""
    from nopad.packing import PackedDataset

    def dataset():
        return PackedDataset(prefix, budget=BUDGET, rank=rank, world_size=ranks)

    list(PackedDataset([[1, 2, 3]] * 9, budget=8))  # compile, or load what was compiled
    before = own_memory()
    start = time.perf_counter()
    data = dataset()
    opened = time.perf_counter() - start
    start, cpu = time.perf_counter(), time.process_time()
    packs = data.count()
    planned, planned_cpu = time.perf_counter() - start, time.process_time() - cpu
    memory = own_memory() - before
    found = {"open_s": opened, "plan_s": planned, "plan_cpu_s": planned_cpu, "packs": packs,
             "documents": len(data.lengths), "own_memory_mb": memory}  # fmt: skip
    for name, share in (("middle", 0.5), ("end", 0.999)):
        state = data.state_dict()
        state["position"]["index"] = int(packs * share) // ranks * ranks
        again = dataset()
        again.load_state_dict(json.loads(json.dumps(state)))
        start = time.process_time()
        next(iter(again))
        found[f"resume_{name}_cpu_s"] = time.process_time() - start
    found["state_bytes"] = len(json.dumps(state))
    found["documents_per_second"] = found["documents"] / planned_cpu
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--rank", type=int, default=7)
    parser.add_argument("--folder", help="where the index is written; default: a temporary folder")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.rank, args.ranks)))
        return
    from record import header, write_record

    rows = []
    for documents in map(int, args.documents):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write_set(Path(folder) / "set", documents)
            command = [sys.executable, __file__, "--measure", f"{folder}/set",
                       "--rank", str(args.rank), "--ranks", str(args.ranks)]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        values = {k: v if isinstance(v, int) else round(v, 3) for k, v in rows[-1].items()}
        print(", ".join(f"{name} {value}" for name, value in values.items()), flush=True)
    record = {**header("scale"), "ranks": args.ranks, "budget": BUDGET, "rows": rows}
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
