"""Tables and plots of the benchmark records; each comes from the newest record of its kind.

Every function below returns Markdown or SVG. `hooks.py` puts the Markdown into the pages, and
`update.py` writes what is committed: the pictures, and the table of the README.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bar_chart import Bar, bar_chart

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

RUNS = {
    "hf": "HF Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "compiled": "HF Trainer, `compile_layers`",
    "accumulation-4": "HF Trainer, accumulation over 4 packs",
    "accumulation-16": "HF Trainer, accumulation over 16 packs",
    "checkpointing": "HF Trainer, gradient checkpointing",
    "fsdp2": "FSDP2 with bf16 parameters, a loop",
    "lora-1b": "LoRA on all linear layers, r = 16",
    "lora-8b": "LoRA, 8B shape",
    "long": "rows of 131,072 tokens, checkpointed",
    "long-offloaded": "the same, `offload_checkpoints`",
}
OURS = "nopad, lengths unknown"
"""As for users, whose requests may end at any token."""
PEER = "transformers continuous batching"
VLLM = "vllm 0.26.0"
WORKLOADS = {
    "a": "512 requests, median 220 tokens in and 160 out",
    "b": "256 requests, 100 to 1024 tokens in and out, 0.6B shape",
    "c": "256 requests of a code assistant: long prompts, short answers",
    "d": "512 requests with one shared prefix",
}


def newest(kind: str) -> tuple[Path, dict[str, Any]]:
    """Return the newest record `DATE-kind.json`, and its path.

    >>> newest("training-users-h200")[1]["benchmark"]
    'training'
    """
    path = sorted(RESULTS.glob(f"????-??-??-{kind}.json"))[-1]
    return path, json.loads(path.read_text(encoding="utf-8"))


def training_table() -> str:
    """Training as users start it, beside the stock trainers."""
    path, record = newest("training-users-h200")
    assert record["users"].keys() == RUNS.keys(), "name the runs of the record in RUNS"
    rows = []
    for name, label in RUNS.items():
        run = record["users"][name]
        ours, stock = run["nopad"], run["stock"]
        rows.append([
            label,
            f"**{_k(ours)}**, {_gb(ours)}",
            f"{_k(stock)}, {_gb(stock)}",
            f"{run['ratio']['tokens_per_second']:.2f}x",
        ])  # fmt: skip
    return _table(["run", "nopad", "stock, flash-attn 2, liger-kernel", "speed"], rows, path)


def loop_table() -> str:
    """Loops in bf16: padded batches, the flattening collator, and ours."""
    path, record = newest("training-h200")
    names = {
        "hf padded sdpa": "padded batches of 8, sdpa",
        "hf flattening + fa2": "flattening collator, flash-attn 2",
        "hf flattening + fa2 + liger": "the same with liger-kernel",
        "nopad eager": "**nopad**",
        "nopad compiled, T fixed": "**nopad**, `compile_layers`",
    }
    rows = [
        [shown, _k(run), f"{run['mfu']:.0%}", _gb(run)]
        for name, shown in names.items()
        if (run := record["results"].get(name))
    ]
    return _table(["loop", "tokens/s", "MFU", "peak memory"], rows, path)


def convergence_table() -> str:
    """Validation losses of packed and padded training."""
    path, record = newest("convergence-h200")
    ways = record["summary"]["validation"]
    head = ["validation loss", *(f"seed {seed}" for seed in range(len(ways["packed"])))]
    rows = [[way, *(f"{loss:.4f}" for loss in losses)] for way, losses in ways.items()]
    return _table(head, rows, path)


def generation_table() -> str:
    """Generation, beside vLLM and Transformers' continuous batching."""
    path, record = newest("generation-h200")
    by_run = {(run.get("workload"), run.get("who")): run for run in record["results"]}
    rows = []
    for workload, shown in WORKLOADS.items():
        ours, vllm = by_run[workload, OURS], by_run[workload, VLLM]
        row = [shown, f"**{_k(ours)}**", f"{_k(vllm)} ({_times(ours, vllm)})"]
        peer = by_run.get((workload, PEER))
        row.append("not run" if peer is None else f"{_k(peer)} ({_times(ours, peer)})")
        rows.append([*row, _k(by_run[workload, "nopad"])])
    head = ["workload", "nopad", "vLLM 0.26", "Transformers continuous batching, warm"]
    head.append("nopad, lengths known")
    return _table(head, rows, path)


def latency_table() -> str:
    """Requests that arrive one by one, beside vLLM: median and p99 in milliseconds."""
    path, record = newest("generation-vllm-h200")
    by_run = {run["who"]: run for run in record["results"] if run.get("workload") == "o"}
    rates = [who.removeprefix("nopad, ") for who in by_run if who.startswith("nopad")]
    rows = []
    for rate in rates:
        pair = by_run[f"nopad, {rate}"], by_run[f"{VLLM}, {rate}"]
        cells = [_latency(run, name) for name in ("ttft", "itl") for run in pair]
        rows.append([rate, f"**{cells[0]}**", cells[1], f"**{cells[2]}**", cells[3]])
    head = ["arrivals", "first token, nopad", "vLLM 0.26", "between tokens, nopad", "vLLM 0.26"]
    return _table(head, rows, path)


def evaluation_table() -> str:
    """One evaluation between two training steps."""
    path, record = newest("evaluation-h200")
    rows = [[run["who"], f"{run['seconds']:.2f} s"] for run in record["results"]]
    return _table(["512 questions with 8 examples each", "time"], rows, path)


def planner_table() -> str:
    """Fill and speed of the planner, beside seqpacker."""
    path, record = newest("packing-aarch64")
    rows = [
        [
            f"{row['mix']}, budget {row['budget']}",
            f"{row['fill']['ours']:.2f} %",
            f"{row['fill']['seqpacker']:.2f} %",
            f"{row['fill']['offline']:.2f} %",
            f"{row['ours_docs_s'] / 1e6:.1f} M",
            f"{row['seqpacker_docs_s'] / 1e6:.1f} M",
        ]
        for row in record["planning"]
    ]
    head = ["lengths", "nopad, fill", "seqpacker, buffers of 1024", "offline best fit"]
    return _table([*head, "nopad, documents/s", "seqpacker"], rows, path)


def results_table() -> str:
    """The table of the README: at most eight rows."""
    _, users = newest("training-users-h200")
    _, loops = newest("training-h200")
    _, generation = newest("generation-h200")
    _, evaluation = newest("evaluation-h200")
    _, packing = newest("packing-aarch64")
    runs, loop = users["users"], loops["results"]
    by_run = {(run.get("workload"), run.get("who")): run for run in generation["results"]}
    planned = packing["planning"][0]
    times = {run["who"]: run["seconds"] for run in evaluation["results"]}
    rows = [
        [f"{shown}, tokens/s", _pair(runs[name]["nopad"]), _pair(runs[name]["stock"])]
        for name, shown in (("hf", "HF Trainer"), ("lora-1b", "LoRA"), ("lora-8b", "LoRA, 8B"))
    ]
    for row in rows:
        row[2] = f"stock trainer, flash-attn 2, liger-kernel: {row[2]}"
    rows += [
        ["bf16 loop, tokens/s", _pair(loop["nopad eager"]),
         f"padded batches: {_pair(loop['hf padded sdpa'])}"],
        ["generation, new tokens/s", _k(by_run["a", OURS]),
         f"vLLM 0.26: {_k(by_run['a', VLLM])}; Transformers: {_k(by_run['a', PEER])}"],
        ["evaluation of 512 questions in training", f"{times['nopad, evaluation 2']:.2f} s",
         f"`generate_batch`: {times['generate_batch, evaluation 2, manager kept']:.2f} s"],
        ["fill, 200,000 log-normal lengths, budget 2048", f"{planned['fill']['ours']:.2f} %",
         f"seqpacker: {planned['fill']['seqpacker']:.2f} %"],
    ]  # fmt: skip
    return _table(["what", "nopad", "compared with"], rows)


def results_plot() -> str:
    """The plot of the README."""
    _, users = newest("training-users-h200")
    _, loops = newest("training-h200")
    _, generation = newest("generation-h200")
    by_run = {(run.get("workload"), run.get("who")): run for run in generation["results"]}
    runs, loop = users["users"], loops["results"]
    groups = [
        ("Training, bf16 loop (tokens per second)", [
            _bar("nopad", loop["nopad eager"], ours=True),
            _bar("flattening collator, flash-attn 2, liger", loop["hf flattening + fa2 + liger"]),
            _bar("flattening collator, flash-attn 2", loop["hf flattening + fa2"]),
            _bar("padded batches", loop["hf padded sdpa"]),
        ]),
        ("HF Trainer, fp32 weights under bf16 autocast", [
            _bar("PackedTrainer", runs["hf"]["nopad"], ours=True),
            _bar("stock, flash-attn 2, liger", runs["hf"]["stock"]),
        ]),
        ("LoRA, r = 16 on all linear layers", [
            _bar("PackedTrainer", runs["lora-1b"]["nopad"], ours=True),
            _bar("stock, flash-attn 2, liger", runs["lora-1b"]["stock"]),
        ]),
        ("Generation (new tokens per second)", [
            _bar("nopad", by_run["a", OURS], ours=True),
            _bar("Transformers continuous batching", by_run["a", PEER]),
            _bar("vLLM 0.26", by_run["a", VLLM]),
        ]),
    ]  # fmt: skip
    note = (
        "Llama-3.2-1B shape, random weights, one H200; vLLM within the hour, the others in one run"
    )
    return bar_chart("Speed beside the usual setups", groups, note)


def _bar(name: str, run: dict[str, Any], ours: bool = False) -> Bar:
    memory = f", {_gb(run)}" if "peak_GB" in run else ""
    return Bar(name, run["tokens_per_second"], f"{_k(run)}{memory}", ours)


def _latency(run: dict[str, Any], name: str) -> str:
    return f"{1000 * run[f'{name}_p50']:.1f} / {1000 * run[f'{name}_p99']:.1f}"


def _times(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    return f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}x"


def _pair(run: dict[str, Any]) -> str:
    return f"{_k(run)}, {_gb(run)}"


def _k(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_second'] / 1000:.1f} k"


def _gb(run: dict[str, Any]) -> str:
    return f"{run['peak_GB']:.0f} GB"


def _table(head: list[str], rows: list[list[str]], path: Path | None = None) -> str:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return table if path is None else f"{table}\n\nRecord: `{path.relative_to(ROOT)}`."
