"""`nopad eval`: tasks of lm-evaluation-harness on a checkpoint, through the engine.

nopad eval --model path/to/checkpoint --tasks arc_easy,gsm8k --limit 200
torchrun --nproc_per_node 4 -m nopad eval --model ... --tasks ...     # one model on each GPU
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def options(argv: list[str]) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        prog="nopad eval",
        description="Evaluate a checkpoint on tasks of lm-evaluation-harness.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder or hub name")
    add("--tokenizer", help="folder or hub name; without it, the model's")
    add("--tasks", required=True, help="names, with commas between them")
    add("--include-path", help="folder with task files of your own")
    add("--limit", type=float, help="documents of each task; below 1, a share of them")
    add("--num-fewshot", type=int, help="examples in a prompt, where the task allows")
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--dtype", default="auto", help="of the weights: auto, float32, bfloat16 or float16")
    add("--device", help="cuda, cuda:1 or cpu; without it, what there is")
    add("--max-length", type=int, help="longest sequence; without it, what the model allows")
    add("--output", type=Path, help="write all results, with every sample, to this JSON file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Evaluate, print a table, and one line of JSON last."""
    args = options(argv)
    names = [name for name in args.tasks.split(",") if name]
    if not names:
        raise ValueError(f"--tasks {args.tasks!r} names no task")
    Harness, make_table = _lm_eval()
    model, tokenizer = load(args)
    _join_ranks()
    harness = Harness(
        model,
        tokenizer,
        names,
        limit=int(args.limit) if args.limit and args.limit >= 1 else args.limit,
        num_fewshot=args.num_fewshot,
        chat=args.chat,
        include_path=args.include_path,
        max_length=args.max_length,
    )
    results = harness.results(samples=args.output is not None)
    if int(os.environ.get("RANK", "0")) == 0:
        _tell(results, make_table, args.output)
    return 0


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The checkpoint's model, on its device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    except OSError as error:
        raise ValueError(f"--model {args.model}: {str(error).splitlines()[0]}") from None
    return model.to(device).eval(), tokenizer


def _lm_eval() -> tuple[Any, Any]:
    try:
        from lm_eval.utils import make_table
    except ImportError:
        raise ValueError("lm-eval is not installed: pip install 'nopad[eval]'") from None
    from ..inference.harness import Harness

    return Harness, make_table


def _join_ranks() -> None:
    """Let the processes of a launcher know each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")  # only answers travel, from host to host


def _tell(results: dict, make_table: Any, output: Path | None) -> None:
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, default=str, indent=1))
    numbers = {
        task: {name: value for name, value in found.items() if isinstance(value, int | float)}
        for task, found in results["results"].items()
    }
    print(json.dumps(numbers))
