"""Generation with many model shapes, each in a process of its own, beside vLLM.

    python benchmarks/bench_shapes.py --record FILE              # on a GPU: what FILE lacks
    python benchmarks/bench_shapes.py --engine vllm --out FILE.jsonl    # in vLLM's environment
    python benchmarks/bench_shapes.py --record FILE --vllm FILE.jsonl   # join the two
    python benchmarks/bench_shapes.py --tiny                     # small shapes, on a CPU

256 requests at once (`shaped` in generation/workloads.py), greedy, with an empty prefix cache; the
median of three calls after a first one. A request may end at any token, yet generates a fixed
number (see workloads.py). vLLM has the same prompts, lengths and configuration; it ignores the end
of text, since its dummy weights may choose it. Floor: generation/floor.py. A shape that fails does
not end the others, and one that the file has already is skipped.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import shapes
import torch
from generation.workloads import Workload, build_model, shaped
from record import header, write_record
from shapes import config_of
from transformers import AutoModelForCausalLM

NUM_SEQS = 256
REPEATS = 3
CHILD_SECONDS = 180
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("llama", shapes.LLAMA_8B),
    "qwen2.5-1.5b": ("qwen2", shapes.QWEN2_1B),
    "qwen3-4b": ("qwen3", shapes.QWEN3_4B),
    "gemma3-1b": ("gemma3_text", shapes.GEMMA3_1B),
    "gemma3-4b": ("gemma3_text", shapes.GEMMA3_4B),
    "olmo2-1b": ("olmo2", shapes.OLMO2_1B),
    "granite-3.3-8b": ("granite", shapes.GRANITE_8B),
    "mistral-7b": ("mistral", shapes.MISTRAL_7B),
    "smollm3-3b": ("smollm3", shapes.SMOLLM3_3B),
    "phi-4-mini": ("phi3", shapes.PHI4_MINI),
    "olmoe-1b-7b": ("olmoe", {**shapes.OLMOE, "num_hidden_layers": 16}),
    "qwen3-30b-a3b": ("qwen3_moe", {**shapes.QWEN3_MOE, "num_hidden_layers": 48}),
}


def workload(vocab_size: int, tiny: bool) -> Workload:
    work = shaped(vocab_size)
    return Workload([p[:9] for p in work.prompts[:4]], [6, 3, 8, 5]) if tiny else work


def run_nopad(name: str, tiny: bool) -> dict[str, Any]:
    """Return the row of bench_generation, and which layers the engine has."""
    from bench_generation import ceilings, run_engine
    from generation.floor import floor_seconds
    from generation.report import build_record

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("nopad.inference")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    on_gpu = torch.cuda.is_available()
    config = config_of(*SHAPES[name], tiny=tiny)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model, work = build_model(config, device, dtype), workload(config.vocab_size, tiny)
    floor = floor_seconds(model, work, *ceilings()) if on_gpu else 0.0
    settings = {"memory": 40 << 30} if on_gpu else {}
    run_engine(name, model, work, floor, max_num_seqs=NUM_SEQS, **settings)
    (row,) = build_record()["results"]
    layers = [text for text in said if text.startswith("fused kernels: ")]
    return row | {"layers": layers[-1].partition(": ")[2] if layers else "stock layers"}


def run_vllm(name: str, tiny: bool) -> dict[str, Any]:
    """Return vLLM's times; its start is not part of any call."""
    import vllm

    config = config_of(*SHAPES[name], tiny=tiny)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = "bfloat16"
    work = workload(config.vocab_size, tiny)
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            gpu_memory_utilization=0.85, max_model_len=2304, max_num_seqs=NUM_SEQS,
            enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip
    startup = time.perf_counter() - start
    prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in work.new
    ]
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        out = llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        assert [len(o.outputs[0].token_ids) for o in out] == work.new
    cold, *times = times
    seconds = statistics.median(times)
    return {
        "who": f"vllm {vllm.__version__}", "seconds": seconds, "tokens": work.new_tokens,
        "tokens_per_second": work.new_tokens / seconds, "spread": max(times) - min(times),
        "cold": cold, "startup_seconds": startup,
    }  # fmt: skip


ENGINES = {"nopad": run_nopad, "vllm": run_vllm}


def measure(name: str, engine: str, tiny: bool) -> dict[str, Any]:
    """Return the figures of a shape, or the error that ended it."""
    try:
        return ENGINES[engine](name, tiny)
    except Exception as error:
        traceback.print_exc(limit=-3)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def run_child(*command: str, seconds: float = CHILD_SECONDS) -> dict[str, Any]:
    """Run a script in a new process; return what it wrote to the file of its option --out."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = (sys.executable, *command, "--out", str(file))
        try:
            subprocess.run(command, check=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            error = f"not done after {seconds:.0f} s"
        except subprocess.CalledProcessError as failure:
            error = f"the process ended with {failure.returncode}"
        else:
            return json.loads(file.read_text())
        print(error, flush=True)
        # What is there was measured before the process failed.
        return json.loads(file.read_text()) if file.exists() else {"error": error}


def line_of(name: str, rows: dict[str, Any]) -> str:
    """Return a line of the table."""
    ours, theirs = rows.get("nopad", {}), rows.get("vllm", {})
    cells = [
        row.get("error")
        or f"{who} {row['tokens_per_second'] / 1e3:.2f} k tok/s, spread {row['spread']:.3f} s"
        for who, row in sorted(rows.items())
    ]
    if "seconds" in ours:
        share = ours.get("share_of_floor", 0)
        cells.append(f"{share:.0%} of the floor, first call {ours['cold']:.1f} s, {ours['layers']}")
    if "seconds" in ours and "seconds" in theirs:
        cells.append(f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times vLLM")
    return f"{name:15} {', '.join(cells) or 'not measured'}"


def main() -> None:
    """Measure the shapes that the file does not have, until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, with commas")
    parser.add_argument("--engine", choices=ENGINES, default="nopad")
    parser.add_argument("--record", type=Path, help="the JSON record, continued if it is there")
    parser.add_argument("--out", type=Path, help="with --engine vllm: append JSON lines to it")
    parser.add_argument("--vllm", type=Path, help="JSON lines of vLLM, to join into the record")
    parser.add_argument("--seconds", type=float, default=360, help="then no shape starts")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--child", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        row = measure(args.child, args.engine, args.tiny)
        args.out.write_text(json.dumps(row, default=float))
        return
    deadline = time.monotonic() + args.seconds
    record = {**header("shapes"), "shapes": {}}
    if args.record is not None and args.record.exists():
        record = json.loads(args.record.read_text())
    found: dict[str, dict[str, Any]] = record["shapes"]
    for file, who in ((args.vllm, "vllm"), (args.out, args.engine)):
        for row in map(json.loads, file.read_text().splitlines() if file and file.exists() else ()):
            found.setdefault(row.pop("shape"), {})[who] = row
    flags = ["--tiny"] if args.tiny else []
    for name in args.only.split(","):
        rows = found.setdefault(name, {})
        if "seconds" not in rows.get(args.engine, {}) and time.monotonic() < deadline:
            command = [__file__, "--child", name, "--engine", args.engine, *flags]
            rows[args.engine] = row = run_child(*command)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps({"shape": name, **row}) + "\n")
        write_record(record, args.record)
        print(line_of(name, rows), flush=True)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
