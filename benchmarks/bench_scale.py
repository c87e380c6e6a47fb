"""What a corpus of 10^6 documents and more costs one rank of 1 to 512.

    python benchmarks/bench_scale.py [--record FILE] [--documents 1e6 1e7 1e8 1e9] [--ranks 1 512]

Every rank plans the order of all packs and reads its own. A set is a folder as `nopad tokenize`
writes it: 256 shards with log-normal lengths, mean 600 tokens, over token files that are holes of
the same size, so that tokens are not read from a disk. One rank opens it in a process of its own
and reports: seconds to open it, from the start to the first pack, and the same after a resume in
the middle and at the end of the epoch; the memory that the process has for itself (anonymous; the
index is mapped, and shared by the ranks of a machine); bytes of the state; and, up to 10^8
documents, seconds to plan the whole epoch, which only `data.count()` does. Ranks beyond the first
are simulated: each does the same work, whatever the others do.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BUDGET, SHARDS = 8192, 256


def write_set(folder: Path, documents: int) -> None:
    """Write a corpus of this many documents whose token files occupy no disk."""
    rng, shards = np.random.default_rng(0), []
    for number in range(SHARDS):
        count = documents * (number + 1) // SHARDS - documents * number // SHARDS
        lengths = np.clip(rng.lognormal(5.9, 1.0, count), 8, 65536).astype("<i4")
        begins = np.cumsum(lengths, dtype="<i8") - lengths
        with (folder / f"{number:05}.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
            file.write(lengths.data)
            file.write((2 * begins).data)
            file.truncate(34 + 12 * count + 8 * (count + 1))
        tokens = int(lengths.sum(dtype=np.int64))
        with (folder / f"{number:05}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        files = {
            end: [(folder / f"{number:05}{end}").stat().st_size, ""] for end in (".bin", ".idx")
        }
        shards.append({"documents": count, "tokens": tokens, "files": files})
    encoded = {"text_column": "text", "format": None, "add_eos": 0, "tokenizer": None}
    manifest = {
        "format": "nopad-tokens-1", "source": "simulated", "tokenizer": None, "encoded": encoded,
        "uses_template": False, "template": None, "dtype": "uint16", "vocab_size": 50000,
        "skipped": {"rows": 0, "reasons": []}, "fingerprint": str(documents), "shards": shards,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def own_memory() -> float:
    """Return the MB that this process shares with no other and could not give back."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("smaps_rollup has no Anonymous line")


def measure(folder: str, rank: int, ranks: int) -> dict:
    """Open the set as one rank, read its first pack, resume in it."""
    from nopad.packing import PackedDataset
    from nopad.packing.readers import WINDOW_DOCUMENTS

    def first_pack(state: dict | None = None) -> tuple[PackedDataset, float, float]:
        start = time.perf_counter()
        data = PackedDataset(folder, budget=BUDGET, rank=rank, world_size=ranks)
        opened = time.perf_counter() - start
        if state is not None:
            data.load_state_dict(json.loads(json.dumps(state)))
        next(iter(data))
        return data, opened, time.perf_counter() - start

    list(PackedDataset([[1, 2, 3]] * 9, budget=8))  # compile, or load what was compiled
    before = own_memory()
    data, opened, first = first_pack()
    documents = len(data.lengths)
    found = {"documents": documents, "ranks": ranks, "open_s": opened, "first_pack_s": first}
    state, packs = data.state_dict(), documents * 600 // BUDGET
    windows = max(1, -(-documents // WINDOW_DOCUMENTS))
    for name, share in (("middle", 0.52), ("end", 0.98)):
        window = int(windows * share)
        # The packs before a window are counted by the state, and not planned again.
        start = packs * window // windows
        index = max(start, int(packs * share) // ranks * ranks)
        state["position"] = {"epoch": 0, "epoch_start": 0, "index": index, "end_epoch": 1}
        if window:
            state["position"] |= {"window": window, "window_start": start}
        found[f"resume_{name}_s"] = first_pack(state)[2]
    found |= {"own_memory_mb": own_memory() - before, "state_bytes": len(json.dumps(state))}
    if documents <= 1e8 and rank == 0:
        cpu = time.process_time()
        found["packs"] = data.count()
        found["plan_cpu_s"] = time.process_time() - cpu
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--folder", help="where sets are written; default: a temporary folder")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        ranks = args.ranks[0]
        print(json.dumps(measure(args.measure, ranks - 1, ranks)))
        return
    from record import header, write_record

    rows = []
    for documents in map(int, args.documents):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write_set(Path(folder), documents)
            for ranks in args.ranks:
                command = [sys.executable, __file__, "--measure", folder, "--ranks", str(ranks)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                values = {k: v if isinstance(v, int) else round(v, 3) for k, v in rows[-1].items()}
                print(", ".join(f"{name} {v}" for name, v in values.items()), flush=True)
    record = {**header("scale"), "budget": BUDGET, "shards": SHARDS, "rows": rows}
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
