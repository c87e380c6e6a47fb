"""Tables and plots of the benchmark records; `families.py` has those of model families.

A table of benchmarks comes from the newest record of its kind.

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
OURS = ("nopad", "nopad, lengths unknown")
"""Records up to 2026-11-17 have both: `nopad` then had requests whose lengths the engine knew."""
PEER = "transformers continuous batching"
VLLM = "vllm 0.26.0"
WORKLOADS = {
    "a": "512 requests, median 220 tokens in and 160 out",
    "b": "256 requests, 100 to 1024 tokens in and out, 0.6B shape",
    "c": "256 requests of a code assistant: long prompts, short answers",
    "d": "512 requests with one shared prefix",
}
ORDERS = ("planned", "balanced", "stream")


def newest(kind: str, device: str = "h200") -> tuple[Path, dict[str, Any]]:
    """Return the newest record `DATE-kind-device.json`, and its path.

    device: a glob; `*` is any device.

    >>> newest("training-users")[1]["benchmark"]
    'training'
    """
    found = sorted(RESULTS.glob(f"????-??-??-{kind}-{device}.json"))
    path = [path for path in found if "-" not in path.stem[len(f"2026-01-01-{kind}-") :]][-1]
    return path, json.loads(path.read_text(encoding="utf-8"))


def training_table() -> str:
    """Training as users start it, beside the stock trainers."""
    path, record = newest("training-users")
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


def grid_table() -> str:
    """Families and modes: the default beside stock layers with liger-kernel."""
    path, record = newest("training-grid")
    rows = [
        [name, *(_grid_cell(cell.get(arm)) for arm in ("nopad", "stock"))]
        for name, cell in record["cells"].items()
    ]
    return _table(["shape", "nopad", "stock, liger-kernel"], rows, path)


def _grid_cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    return run["error"].split(":")[0] if "error" in run else f"{_k(run)}, {_beyond(run)}"


def models_table() -> str:
    """An encoder, a hybrid and a model of images, packed beside padded batches."""
    path, record = newest("models")
    shown = {
        "qwen3.5-1b": "gated delta net of 1B (Qwen3.5), flash-linear-attention",
        "modernbert-base": "ModernBERT-base, masked LM",
        "qwen2.5-vl-3b lora": "Qwen2.5-VL-3B with images, LoRA",
    }
    rows = []
    for name, label in shown.items():
        packed, padded = (record["cells"][name][arm] for arm in ("packed", "padded"))
        speed = packed["tokens_per_second"] / padded["tokens_per_second"]
        rows.append([
            label,
            f"**{_k(packed)}**, {_gb(packed)}",
            f"{_k(padded)}, {_gb(padded)}",
            f"{padded['fill']:.0%}",
            f"{speed:.1f}x",
        ])  # fmt: skip
    return _table(["model", "packed", "padded", "fill of padded", "speed"], rows, path)


def preferences_table() -> str:
    """DPO and reward training beside TRL's trainers."""
    path, record = newest("preferences")
    rows = []
    for task, name in {"dpo": "DPO", "reward": "reward model"}.items():
        ways = record["results"][task]
        best = max(run.get("pairs_per_second", 0) for way, run in ways.items() if way != "nopad")
        rows.append([
            name,
            *(_pairs(ways[way]) for way in ("nopad", "TRL", "TRL liger")),
            f"{ways['nopad']['pairs_per_second'] / best:.1f}x",
        ])  # fmt: skip
    head = ["pairs per second, peak memory", "nopad", "TRL", "TRL, liger-kernel", "speed"]
    return _table(head, rows, path)


def _pairs(run: dict[str, Any]) -> str:
    return "does not run" if "error" in run else f"{run['pairs_per_second']:.1f}, {_gb(run)}"


def rollouts_table() -> str:
    """Seconds of a GRPO step."""
    path, record = newest("rollouts")
    rows = [
        [f"{cell['shape'].upper()}, {cell['way']}",
         *(f"{cell[part + '_s']:.1f}" for part in ("step", "generation", "loss_and_backward")),
         f"{cell['steps_per_hour']:.0f}"]
        for cell in record["results"]
    ]  # fmt: skip
    head = ["shape, way", "step, s", "generation, s", "loss and backward, s", "steps per hour"]
    return _table(head, rows, path)


def loop_table() -> str:
    """Loops in bf16: padded batches, the flattening collator, and ours."""
    path, record = newest("training")
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
    path, record = newest("convergence")
    ways = record["summary"]["validation"]
    head = ["validation loss", *(f"seed {seed}" for seed in range(len(ways["packed"])))]
    rows = [[way, *(f"{loss:.4f}" for loss in losses)] for way, losses in ways.items()]
    return _table(head, rows, path)


def generation_table() -> str:
    """Generation beside vLLM."""
    path, by_run = _generation("generation-vllm")
    rows = []
    for workload, shown in WORKLOADS.items():
        ours, vllm = _ours(by_run, workload), by_run[workload, VLLM]
        rows.append([shown, f"**{_k(ours)}**", _k(vllm), _times(ours, vllm)])
    return _table(["workload", "nopad", "vLLM 0.26", "speed"], rows, path)


def transformers_table() -> str:
    """Generation beside Transformers' continuous batching."""
    path, by_run = _generation("generation")
    rows = []
    for workload, shown in WORKLOADS.items():
        if (peer := by_run.get((workload, PEER))) is None:
            workload, shown = f"{workload}, 32 of its requests", f"{shown}; 32 of them"
            peer = by_run[workload, PEER]
        ours = _ours(by_run, workload)
        rows.append([shown, f"**{_k(ours)}**", _k(peer), _times(ours, peer)])
    return _table(["workload", "nopad", "continuous batching, warm", "speed"], rows, path)


def generation_cpu_table() -> str:
    """Generation on one CPU thread, beside static batches."""
    path, record = newest("generation", "cpu")
    rows = [[run["who"], f"{run['seconds']:.1f} s"] for run in record["results"] if "who" in run]
    return _table(["64 requests", "CPU time"], rows, path)


def latency_table() -> str:
    """Requests that arrive one by one, beside vLLM: median and p99 in milliseconds."""
    path, runs = _generation("generation-vllm")
    by_run = {who: run for (workload, who), run in runs.items() if workload == "o"}
    rates = [who.removeprefix("nopad, ") for who in by_run if who.startswith("nopad")]
    rows = []
    for rate in rates:
        pair = by_run[f"nopad, {rate}"], by_run[f"{VLLM}, {rate}"]
        cells = [_latency(run, name) for name in ("ttft", "itl") for run in pair]
        rows.append([rate, f"**{cells[0]}**", cells[1], f"**{cells[2]}**", cells[3]])
    head = ["arrivals", "first token, nopad", "vLLM 0.26", "between tokens, nopad", "vLLM 0.26"]
    return _table(head, rows, path)


def capacity_table() -> str:
    """A minute at 90 % of capacity, in thirds."""
    path, by_run = _generation("generation-vllm")
    who, run = next((who, run) for (workload, who), run in by_run.items() if workload == "q")
    thirds = zip(run["in_flight_by_third"], run["ttft_p50_by_third"], strict=True)
    rows = [
        [f"{name} 20 seconds", f"{in_flight:.0f}", f"{1000 * ttft:.1f} ms"]
        for name, (in_flight, ttft) in zip(("first", "second", "third"), thirds, strict=True)
    ]
    head = [who.removeprefix("nopad, "), "requests in flight", "first token, median"]
    return _table(head, rows, path)


def engine_table() -> str:
    """The first call of an engine, and steps in which a prompt joins running requests."""
    path, by_run = _generation("generation-vllm")
    rows = [
        [f"first call in a process, {who.removeprefix('nopad, ')}", f"{run['seconds']:.1f} s", ""]
        for (workload, who), run in by_run.items()
        if workload == "i"
    ]
    for (workload, who), run in by_run.items():
        if workload == "p":
            label = f"step with {who.removeprefix('nopad, ')}"
            products = f"{run['times_reference']:.2f}x"
            rows.append([label, f"{1000 * run['step_seconds']:.1f} ms", products])
    return _table(["what", "time", "over its products and attention alone"], rows, path)


def evaluation_table() -> str:
    """One evaluation between two training steps."""
    path, record = newest("evaluation")
    rows = [[run["who"], f"{run['seconds']:.2f} s"] for run in record["results"]]
    return _table(["512 questions with 8 examples each", "time"], rows, path)


def lm_eval_table() -> str:
    """lm_eval tasks with the engine and with lm_eval's own model, on one CPU thread."""
    path, record = newest("evaluation-smollm2", "cpu")
    parts = {
        "12 questions of GSM8K with 8 examples, 64 new tokens": record["results"],
        "8 multiple-choice questions": record["multiple_choice"]["results"],
    }
    rows = []
    for shown, runs in parts.items():
        ours = next(run["seconds"] for run in runs if run["who"] == "nopad")
        peer = min(run["seconds"] for run in runs if run["who"].startswith("lm_eval"))
        rows.append([shown, f"**{ours:.0f} s**", f"{peer:.0f} s", f"{peer / ours:.1f}x"])
    return _table(["task", "nopad", "lm_eval, `hf`", "speed"], rows, path)


def attention_table() -> str:
    """Forward and backward of packed rows."""
    path, record = newest("attention")
    rows = [
        [
            f"{row['tokens']:,} tokens in {row['sequences']} documents, head dim {row['head_dim']}",
            f"**{row['attend_chosen_ms']:.1f} ms**",
            f"{row['attend_ms']:.1f} ms",
            f"{row['flash_direct_ms']:.1f} ms",
            f"{row['sdpa_block_mask_ms']:.1f} ms" if "sdpa_block_mask_ms" in row else "not run",
        ]
        for row in record["training"]
    ]
    head = ["row", "`attend`", "`attend` with flash-attn 2", "flash-attn 2 called directly"]
    return _table([*head, "SDPA with a block mask"], rows, path)


def paged_table() -> str:
    """Attention over pages of 256 tokens, in relation to flash-attn 2."""
    path, record = newest("attention")
    kinds = {
        "decode, sequences of equal length": record["decode"],
        "decode, log-normal lengths": record["decode_uneven"],
        "prefill, alone or mixed with decode": record["mixed"],
    }
    rows = []
    for shown, runs in kinds.items():
        ratios = [
            run["triton_page256_us"] / run["flash2_page256_us"]
            for run in runs
            if "flash2_page256_us" in run
        ]
        rows.append([shown, str(len(ratios)), f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return _table(["step", "shapes", "time over that of flash-attn 2"], rows, path)


def planner_table() -> str:
    """Fill and speed of the planner, beside seqpacker."""
    path, record = newest("packing", "*")
    fills = _current_fills()
    rows = [
        [
            f"{row['mix']}, budget {row['budget']}",
            f"{fills[row['mix'], row['budget']]:.2f} %",
            f"{row['fill']['seqpacker']:.2f} %",
            f"{row['fill']['offline']:.2f} %",
            f"{row['ours_docs_s'] / 1e6:.1f} M",
            f"{row['seqpacker_docs_s'] / 1e6:.1f} M",
        ]
        for row in record["planning"]
    ]
    head = ["lengths", "nopad, fill", "seqpacker, buffers of 1024", "offline best fit"]
    return _table([*head, "nopad, documents/s", "seqpacker"], rows, path)


def planner_change_table() -> str:
    """Fill and seconds of the planner and of the one before it."""
    path, record = newest("order", "*")
    rows = [
        [f"{row['mix']}, budget {row['budget']}", f"{row['fill']:.2f} %",
         f"{row['before']['fill']:.2f} %", f"{1e3 * row['seconds']:.0f} ms",
         f"{1e3 * row['before']['seconds']:.0f} ms"]
        for row in record["mixes"]
    ]  # fmt: skip
    head = ["200,000 lengths, as a stream", "fill", "fill before", "CPU time", "CPU time before"]
    return _table(head, rows, path)


def pipeline_table() -> str:
    """From memory-mapped tokens to packs and batches, beside other packers."""
    path, record = newest("packing", "*")
    rates = {
        "packs": "nopad, from memory-mapped tokens",
        "datasets": "nopad, from rows of `datasets`",
        "datasets alone": "`datasets` alone, rows read and not packed",
        "TRL": "TRL, `packing=True`",
        "Grain": "Grain",
    }
    runs = record["end_to_end"]
    rows = [
        [f"{shown}, documents/s", *(f"{run['docs_s'][name] / 1000:.0f} k" for run in runs)]
        for name, shown in rates.items()
    ]
    times = {
        "packs": "nopad, a pack read",
        "collated": "nopad, a pack read and collated",
        "HF collator": "HF flattening collator, the same documents",
    }
    rows += [
        [f"{shown}, µs", *(f"{run['row_us'][name]:.0f}" for run in runs)]
        for name, shown in times.items()
    ]
    return _table(["", *(f"{run['mix']}, budget {run['budget']}" for run in runs)], rows, path)


def order_table() -> str:
    """Whether the place of a document depends on anything but chance."""
    path, record = newest("order", "*")
    budgets = sorted({row["budget_over_mean"] for row in record["rows"]})
    cells: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in sorted(record["rows"], key=lambda row: ORDERS.index(row["way"])):
        place = row["way"], row["lengths"], row["documents"]
        cells.setdefault(place, {})[row["budget_over_mean"]] = _order_cell(row)
    rows = [
        [way, f"{lengths}, {documents:,}", *(by_budget.get(budget, "–") for budget in budgets)]
        for (way, lengths, documents), by_budget in cells.items()
    ]
    return _table(["", "documents", *(f"{n} x mean" for n in budgets)], rows, path)


def order_bound_table() -> str:
    """How often documents must meet again, by fill."""
    path, record = newest("order-bound", "*")
    rows = [
        [f"{row['lengths']}, {row['documents']:,}", f"{row['fill']:.2f} %",
         f"{row['over_chance']:.1f}"]
        for row in record["rows"]
        if row["over_chance"] > 0
    ]  # fmt: skip
    head = ["documents", "fill, at least", "pairs meet again, relative to chance, at least"]
    return _table(head, rows, path)


def scale_table() -> str:
    """What a corpus costs one rank of many: seconds to its first pack, and after a resume."""
    path, record = newest("scale", "*")
    rows = [
        [
            f"{row['documents']:,}",
            f"{row['ranks']}",
            *(f"{row[name]:.1f} s" for name in ("open_s", "first_pack_s", "resume_middle_s")),
            f"{row['resume_end_s']:.1f} s",
            f"{row['own_memory_mb']:.0f} MB",
            f"{row['state_bytes']} bytes",
        ]
        for row in record["rows"]
    ]
    head = ["documents", "ranks", "open", "first pack", "resume in the middle", "resume at the end"]
    return _table([*head, "own memory", "state"], rows, path)


def tokenize_table() -> str:
    """Speed of tokenizers with the same number of processes."""
    path, record = newest("tokenize", "*")
    names = {
        "nopad": "`nopad tokenize`, fastokens", "nopad_stock": "`nopad tokenize`, tokenizers",
        "datasets": "`datasets.map`", "megatron": "Megatron's preprocessing",
        "datatrove": "datatrove",
    }  # fmt: skip
    rows = [
        [
            names[row["name"]],
            f"{row['text_mb']:,.0f} MB",
            f"{row['seconds']:.1f} s",
            f"{row['mb_per_s']:.1f}",
            f"{row['mb_per_cpu_s']:.1f}",
            f"{row['tokens_per_cpu_s'] / 1e6:.2f} M",
            f"{row['memory_mb']:,.0f} MB",
        ]
        for row in record["rows"]
    ]
    head = ["", "text", "time", "MB/s", "MB per CPU second", "tokens per CPU second", "memory"]
    return _table(head, rows, path)


def _names(types: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in types)


def results_table() -> str:
    """The table of the README: at most eight rows."""
    _, loops = newest("training")
    _, by_vllm = _generation("generation-vllm")
    _, by_peer = _generation("generation")
    _, evaluation = newest("evaluation")
    _, packing = newest("packing", "*")
    loop = loops["results"]
    planned = packing["planning"][0]
    times = {run["who"]: run["seconds"] for run in evaluation["results"]}
    rows = [[f"{shown}, tokens/s", *map(_pair, pair)] for shown, pair in _default_layers().items()]
    for row in rows:
        row[2] = f"stock trainer, flash-attn 2, liger-kernel: {row[2]}"
    rows += [
        ["bf16 loop, tokens/s", _pair(loop["nopad compiled, T fixed"]),
         f"padded batches: {_pair(loop['hf padded sdpa'])}"],
        ["generation, new tokens/s", _k(_ours(by_vllm, "a")),
         f"vLLM 0.26: {_k(by_vllm['a', VLLM])}"],
        ["generation, an earlier run", _k(_ours(by_peer, "a")),
         f"Transformers continuous batching: {_k(by_peer['a', PEER])}"],
        ["evaluation of 512 questions in training", f"{times['nopad, evaluation 2']:.2f} s",
         f"`generate_batch`: {times['generate_batch, evaluation 2, manager kept']:.2f} s"],
        ["fill, 200,000 log-normal lengths, budget 2048",
         f"{_current_fills()[planned['mix'], planned['budget']]:.2f} %",
         f"seqpacker: {planned['fill']['seqpacker']:.2f} %"],
    ]  # fmt: skip
    return _table(["what", "nopad", "compared with"], rows)


def results_plot() -> str:
    """The plot of the README."""
    _, loops = newest("training")
    _, by_vllm = _generation("generation-vllm")
    _, by_peer = _generation("generation")
    runs, loop = _default_layers(), loops["results"]
    groups = [
        ("Training, bf16 loop (tokens per second)", [
            _bar("nopad", loop["nopad compiled, T fixed"], ours=True),
            _bar("flattening collator, flash-attn 2, liger", loop["hf flattening + fa2 + liger"]),
            _bar("flattening collator, flash-attn 2", loop["hf flattening + fa2"]),
            _bar("padded batches", loop["hf padded sdpa"]),
        ]),
        ("HF Trainer, fp32 weights under bf16 autocast", [
            _bar("PackedTrainer", runs["HF Trainer"][0], ours=True),
            _bar("stock, flash-attn 2, liger", runs["HF Trainer"][1]),
        ]),
        ("LoRA, r = 16 on all linear layers", [
            _bar("PackedTrainer", runs["LoRA"][0], ours=True),
            _bar("stock, flash-attn 2, liger", runs["LoRA"][1]),
        ]),
        ("Generation (new tokens per second)", [
            _bar("nopad", _ours(by_vllm, "a"), ours=True),
            _bar("vLLM 0.26", by_vllm["a", VLLM]),
        ]),
        ("Generation, an earlier run", [
            _bar("nopad", _ours(by_peer, "a"), ours=True),
            _bar("Transformers continuous batching", by_peer["a", PEER]),
        ]),
    ]  # fmt: skip
    note = (
        "Llama-3.2-1B shape, random weights, one H200; vLLM within the hour, the others in one run"
    )
    return bar_chart("Speed beside the usual setups", groups, note)


def _default_layers() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return our run with the layers of today's default, and that of the stock trainer."""
    _, grid = newest("training-grid")
    full, lora = grid["hf, the default"], grid["cells"]["llama-1b lora"]
    return {
        "HF Trainer": (full["nopad"], full["stock"]),
        "LoRA": (lora["nopad"], lora["stock"]),
    }


def _generation(kind: str) -> tuple[Path, dict[tuple[str, str], dict[str, Any]]]:
    """Return the newest record of `kind`, its runs by workload and engine."""
    path, record = newest(kind)
    runs = [run for run in record["results"] if "who" in run]
    return path, {(run["workload"], run["who"]): run for run in runs}


def _ours(by_run: dict[tuple[str, str], dict[str, Any]], workload: str) -> dict[str, Any]:
    return [by_run[workload, who] for who in OURS if (workload, who) in by_run][-1]


def _current_fills() -> dict[tuple[str, int], float]:
    """Return the fill of each mix and budget; it is the same on every machine."""
    _, record = newest("order", "*")
    return {(row["mix"], row["budget"]): row["fill"] for row in record["mixes"]}


def _order_cell(row: dict[str, Any]) -> str:
    largest = max(abs(row[name]) for name in ("length", "epochs", "seeds"))
    shown = f"{largest:.3f}{'' if row['passes'] else '*'}"
    return f"{shown} · {row['again_over_chance']:.1f} · {row['fill']:.2f}"


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


def _beyond(run: dict[str, Any]) -> str:
    return f"{run['beyond_training_state_GB']:.1f} GB"


def _table(head: list[str], rows: list[list[str]], path: Path | None = None) -> str:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return table if path is None else f"{table}\n\nRecord: `{path.relative_to(ROOT)}`."
