"""Speed and memory of `nopad tokenize`, beside datasets.map, Megatron's loop and datatrove.

    python benchmarks/bench_tokenize.py corpus.jsonl tokenizer.json --eos TOKEN [--processes 2]
        [--peer-bytes 1e8] [--repeats 3] [--record FILE.json]

corpus.jsonl has a column `text`. All tokenize its first `--peer-bytes` with the same tokenizer
and number of processes, ours with fastokens and with tokenizers alone, `--repeats` times one after
another; those of `--whole` then tokenize the whole file. Each runs in a process of its own. A row
has medians, and in `seconds_of_runs` the time of each run. Seconds are wall-clock time with imports
and the load of the tokenizer, `cpu_seconds` those of all its processes; MB are those of the texts.
`memory_mb` is the largest sum of the anonymous memory of its processes, sampled every half second;
`memory_tenths_mb` is its mean in each tenth of the time, `mapped_tenths_mb` that of mapped files,
which the system may drop.

Megatron's preprocess_data.py is not in its package: `megatron` is its loop (a pool of processes
that encode lines, `imap` in chunks of 32) over the package's own `IndexedDatasetBuilder`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median

PEERS = ("nopad", "nopad_stock", "datasets", "megatron", "datatrove")


def load_tokenizer(path: str, eos: str):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, eos_token=eos)


def run_nopad(args: argparse.Namespace, out: str) -> int:
    from nopad.packing import tokenize

    tokenizer = load_tokenizer(args.tokenizer, args.eos)
    return tokenize(args.corpus, out, tokenizer=tokenizer, processes=args.processes)["tokens"]


def run_nopad_stock(args: argparse.Namespace, out: str) -> int:
    sys.modules["fastokens"] = None  # pyright: ignore[reportArgumentType]  as if not installed
    return run_nopad(args, out)


def run_datasets(args: argparse.Namespace, out: str) -> int:
    import datasets
    import pyarrow.compute as pc

    tokenizer = load_tokenizer(args.tokenizer, args.eos)
    data = datasets.load_dataset("json", data_files=args.corpus, split="train", cache_dir=out)

    def encode(batch):
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*each, tokenizer.eos_token_id] for each in ids]}

    data = data.map(encode, batched=True, num_proc=args.processes, remove_columns=data.column_names)
    return sum(pc.sum(each.value_lengths()).as_py() for each in data.data["input_ids"].chunks)


def run_megatron(args: argparse.Namespace, out: str) -> int:
    import multiprocessing

    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    global encode_line
    tokenizer = load_tokenizer(args.tokenizer, args.eos)

    def encode_line(line):
        return [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]

    builder, tokens = IndexedDatasetBuilder(f"{out}/set.bin", dtype=np.int32), 0
    with open(args.corpus, encoding="utf-8") as file:
        pool = multiprocessing.get_context("fork").Pool(args.processes)
        for ids in pool.imap(encode_line, file, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{out}/set.idx")
    return tokens


def run_datatrove(args: argparse.Namespace, out: str) -> int:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    # A task reads whole files, so each process gets one of its own.
    Path(out, "in").mkdir()
    with ExitStack() as stack:
        parts = [
            stack.enter_context(Path(out, "in", f"{part}.jsonl").open("wb"))
            for part in range(args.processes)
        ]
        for line, part in zip(stack.enter_context(open(args.corpus, "rb")), cycle(parts)):
            part.write(line)
    steps = [
        JsonlReader(f"{out}/in"),
        DocumentTokenizer(
            output_folder=f"{out}/tokens", tokenizer_name_or_path=args.tokenizer,
            eos_token=args.eos, shuffle_documents=False,
        ),
    ]  # fmt: skip
    LocalPipelineExecutor(
        pipeline=steps, tasks=args.processes, workers=args.processes, logging_dir=f"{out}/logs"
    ).run()
    files = Path(out, "tokens").rglob("*.ds")
    return sum(file.stat().st_size for file in files) // 4


def sample(group: int, cpu: dict[int, float]) -> tuple[float, float]:
    """Return the MB of a process group's own memory and of mapped files; update CPU seconds."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = {"Pss_Anon:": 0, "Pss_File:": 0}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                cpu[int(folder.name)] = (int(fields[11]) + int(fields[12])) / ticks
                for line in (folder / "smaps_rollup").read_text().splitlines():
                    name, kb, *_ = line.split()
                    if name in total:
                        total[name] += int(kb)
        except (OSError, ValueError):
            continue
    return total["Pss_Anon:"] / 1024, total["Pss_File:"] / 1024


def tenths(values: Sequence[float]) -> list[float]:
    """Return the mean of each tenth of the time."""
    cuts = [len(values) * n // 10 for n in range(11)]
    return [round(sum(values[a:b]) / max(1, b - a), 1) for a, b in pairwise(cuts)]


def measure(name: str, args: argparse.Namespace, corpus: Path) -> dict:
    """Run one tokenizer in a process group of its own."""
    with tempfile.TemporaryDirectory(dir=args.folder) as out:
        command = [sys.executable, __file__, str(corpus), args.tokenizer, "--eos", args.eos,
                   "--processes", str(args.processes), "--run", name, "--out", out]  # fmt: skip
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        memory, cpu = [], {}
        while child.poll() is None:
            memory.append(sample(child.pid, cpu))
            time.sleep(0.5)
        seconds = time.perf_counter() - start
        printed, errors = child.communicate()
        if child.returncode:
            return {"name": name, "failed": " ".join(errors.split())[-300:]}
    tokens = int(printed.splitlines()[-1])
    text = sum(len(json.loads(line)["text"].encode()) for line in corpus.open("rb")) / 1e6
    after, (own, files) = resource.getrusage(resource.RUSAGE_CHILDREN), zip(*memory, strict=True)
    waited = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Samples miss the last half second; datatrove does not wait for its processes.
    cpu_seconds = max(waited, sum(cpu.values()))
    return {
        "name": name, "text_mb": text, "tokens": tokens, "seconds": seconds,
        "mb_per_s": text / seconds, "tokens_per_s": tokens / seconds, "cpu_seconds": cpu_seconds,
        "mb_per_cpu_s": text / cpu_seconds, "tokens_per_cpu_s": tokens / cpu_seconds,
        "memory_mb": max(own), "memory_tenths_mb": tenths(own), "mapped_tenths_mb": tenths(files),
    }  # fmt: skip


def medians(runs: list[dict]) -> dict:
    """Return one row of several runs; the first that failed, if one did."""
    row = next((run for run in runs if "failed" in run), runs[0])
    if "failed" in row:
        return row
    numbers = [name for name, value in row.items() if isinstance(value, float)]
    times = {"seconds_of_runs": [run["seconds"] for run in runs]}
    return row | {name: median(run[name] for run in runs) for name in numbers} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus")
    parser.add_argument("tokenizer")
    parser.add_argument("--eos", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--peer-bytes", type=float, default=1e8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--whole", nargs="*", default=["nopad"], choices=PEERS)
    parser.add_argument("--folder", help="where results are written; default: a temporary folder")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--run", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(globals()[f"run_{args.run}"](args, args.out))
        return
    from record import header, write_record

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        part, size = Path(folder) / "part.jsonl", 0
        with open(args.corpus, "rb") as lines, part.open("wb") as file:
            for line in lines:
                file.write(line)
                size += len(line)
                if size > args.peer_bytes:
                    break
        runs: dict[tuple[str, Path], list[dict]] = {}
        order = [(name, part) for name in args.peers] * args.repeats
        for name, corpus in order + [(name, Path(args.corpus)) for name in args.whole]:
            row = measure(name, args, corpus)
            runs.setdefault((name, corpus), []).append(row)
            shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
            print(", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    rows = [medians(several) for several in runs.values()]
    record = {**header("tokenize"), "processes": args.processes, "rows": rows}
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
