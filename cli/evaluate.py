"""`nopad eval`: lm-evaluation-harness tasks on a checkpoint, through the engine.

    nopad eval path/to/checkpoint --tasks arc_easy,gsm8k --limit 200
    torchrun --nproc_per_node 4 -m nopad eval path/to/checkpoint --tasks ...   # one model per GPU

Scores equal those of `lm_eval --model hf`. The output is a table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .load_pretrained import check_chat_template, checkpoint_path, load_model, load_tokenizer
from .options import (
    add_model_argument,
    add_model_options,
    count,
    count_or_fraction,
    parser,
    positive,
    writable_path,
)
from .terminal import console, printable, table


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command's options."""
    command = parser("eval", "MODEL --tasks NAMES [options]", __doc__)
    add = command.add_argument
    add_model_argument(add, "checkpoint folder or hub name")
    add("--tasks", required=True, help="task names, separated by commas")
    add("--include-path", type=os.path.expanduser, help="folder with your own task files")
    add("--limit", type=count_or_fraction, help="documents per task; below 1, a fraction of them")
    add("--num-fewshot", type=count, help="few-shot examples per prompt, if the task allows them")
    add("--chat", action="store_true", help="apply the tokenizer's chat template to prompts")
    add("--system-instruction", help="text before every prompt, or the system message of a chat")
    add_model_options(add)
    add("--max-model-len", type=positive, help="longest sequence; default: the model's")
    add("--output", type=writable_path, help="JSON file for all results and every sample")
    return command.parse_args(argv)


def main(argv: list[str]) -> int:
    """Evaluate; print a table, and one line of JSON last."""
    args = parse_args(argv)
    tasks = [name for name in map(str.strip, args.tasks.split(",")) if name]
    if not tasks:
        raise ValueError(f"--tasks {args.tasks!r} names no task")
    name = checkpoint_path(args.model)
    from ..inference.harness import Harness, find_tasks
    from ..runtime import destroy_group, init_group

    manager = find_tasks(tasks, args.include_path)  # fails before the model is loaded
    tokenizer = load_tokenizer(args.tokenizer or name)
    if args.chat:
        check_chat_template(tokenizer)
    model = load_model(name, args.dtype, args.device)
    init_group()
    harness = Harness(
        model,
        tokenizer,
        tasks,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat=args.chat,
        system_instruction=args.system_instruction,
        task_manager=manager,
        max_length=args.max_model_len,
    )
    results = harness.results(samples=args.output is not None)
    if int(os.environ.get("RANK", "0")) == 0:
        results["config"] = {**vars(args), "dtype": str(model.dtype)}
        _print_results(results, args.output)
    destroy_group()
    return 0


def _print_results(results: dict, output: Path | None) -> None:
    out = console()
    for title, scores in (("task", results["results"]), ("group", results.get("groups"))):
        if scores:
            out.print(_score_table(title, scores, results.get("n-shot", {})))
    numbers = {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in results["results"].items()
    }
    print(json.dumps(numbers))
    if output is not None:  # last: a full disk hides no score
        text = json.dumps(results, default=str, indent=1, ensure_ascii=False)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OSError(f"--output {output} is not written: {error.strerror}") from None


def _score_table(title: str, scores: dict, shots: dict) -> Any:
    """Return a table with a row for each metric of each task."""
    made = table(title, "few-shot", "filter", "metric", "value", "± stderr", right=("value",))
    for task, metrics in scores.items():
        for name, value in metrics.items():
            metric, _, filter_name = name.partition(",")
            if not isinstance(value, int | float) or not filter_name or "_stderr" in metric:
                continue
            error = metrics.get(f"{metric}_stderr,{filter_name}")
            spread = f"{error:.4f}" if isinstance(error, int | float) else ""
            cells = (task, shots.get(task, ""), filter_name, metric, f"{value:.4f}", spread)
            made.add_row(*map(printable, cells))
    return made
