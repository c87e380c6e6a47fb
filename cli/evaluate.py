"""`nopad eval`: tasks of lm-evaluation-harness on a checkpoint, through the engine.

    nopad eval --model path/to/checkpoint --tasks arc_easy,gsm8k --limit 200
    torchrun --nproc_per_node 4 -m nopad eval --model ... --tasks ...     # one model on each GPU

Scores are those of `lm_eval --model hf`. A table comes out, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .checkpoints import check_chat_template, checkpoint_path, load_model, load_tokenizer
from .options import add_model_options, count, count_or_fraction, parser, positive, writable_path


def options(argv: list[str]) -> argparse.Namespace:
    """Every setting, documented."""
    made = parser("eval", __doc__)
    add = made.add_argument
    add("--model", required=True, help="checkpoint folder or hub name")
    add("--tasks", required=True, help="names, with commas between them")
    add("--include-path", type=os.path.expanduser, help="folder with task files of your own")
    add("--limit", type=count_or_fraction, help="documents of each task; below 1, a share of them")
    add("--num-fewshot", type=count, help="examples in a prompt, where the task allows")
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--system-instruction", help="what stands before every prompt")
    add_model_options(add)
    add("--max-model-len", type=positive, help="longest sequence; without it, what the model allows")
    add(
        "--output",
        type=writable_path,
        help="write all results, with every sample, to this JSON file",
    )
    return made.parse_args(argv)


def main(argv: list[str]) -> int:
    """Evaluate, print a table, and one line of JSON last."""
    args = options(argv)
    names = [name for name in map(str.strip, args.tasks.split(",")) if name]
    if not names:
        raise ValueError(f"--tasks {args.tasks!r} names no task")
    name = checkpoint_path(args.model)
    harness, make_table = _lm_eval()
    from ..runtime import destroy_group, init_group

    manager = harness.find_tasks(names, args.include_path)  # before a model is loaded in vain
    tokenizer = load_tokenizer(args.tokenizer or name)
    if args.chat:
        check_chat_template(tokenizer)
    model = load_model(name, args.dtype, args.device)
    init_group()
    ready = harness.Harness(
        model,
        tokenizer,
        names,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat=args.chat,
        system_instruction=args.system_instruction,
        task_manager=manager,
        max_length=args.max_model_len,
    )
    results = ready.results(samples=args.output is not None)
    if int(os.environ.get("RANK", "0")) == 0:
        results["config"] = {**vars(args), "dtype": str(model.dtype)}  # whose scores these are
        _tell(results, make_table, args.output)
    destroy_group()
    return 0


def _lm_eval() -> tuple[Any, Any]:
    try:
        from lm_eval.utils import make_table
    except ImportError:
        raise ImportError("lm-eval is not installed: pip install 'nopad[eval]'") from None
    from ..inference import harness

    return harness, make_table


def _tell(results: dict, make_table: Any, output: Path | None) -> None:
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if output is not None:
        text = json.dumps(results, default=str, indent=1, ensure_ascii=False)
        output.write_text(text, encoding="utf-8")
    numbers = {
        task: {name: value for name, value in found.items() if isinstance(value, int | float)}
        for task, found in results["results"].items()
    }
    print(json.dumps(numbers))
