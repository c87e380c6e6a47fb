"""Evaluate a saved checkpoint by generation, with prompts and references from a file.

    python -m nopad.recipes.evaluate_checkpoint runs/pretrain-1/checkpoint-200 \\
        --data test.jsonl --prompt "Question: {question}\\nAnswer:" --reference "{answer}" \\
        --regex "#### (-?[0-9.,]+)"

This is the evaluation that runs during training (`GenerationEval`), so the metrics are the same.
Several processes divide the prompts:
`torchrun --nproc_per_node 4 -m nopad.recipes.evaluate_checkpoint ...`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nopad.cli import (
    HelpFormatter,
    add_model_argument,
    add_model_options,
    check_chat_template,
    checkpoint_path,
    count,
    load_model,
    load_tokenizer,
    number_above_0,
    number_from_0,
    positive,
    printable,
)

if TYPE_CHECKING:
    from nopad.trainer.evaluation import Report


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluate a saved checkpoint by generation.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add_model_argument(add, "checkpoint folder or hub name")
    add("--data", type=Path, required=True, help="jsonl file, one example per line")
    add("--prompt", default="{prompt}", help="template of the prompt, with column names in braces")
    add("--reference", default="{completion}", help="template of the reference")
    add("--regex", help="also compare what this regular expression extracts from completion and "
        "reference")  # fmt: skip
    add("--chat", action="store_true", help="apply the tokenizer's chat template to the prompts")
    add("--limit", type=positive, help="maximum number of examples")
    add("--max-tokens", type=positive, default=256, help="maximum new tokens per completion")
    add("--stop", action="append", default=[], help="stop string; may be repeated")
    add("--temperature", type=number_from_0, default=0.0, help="sampling temperature; 0 is greedy")
    add("--seed", type=int, default=0, help="sampling seed")
    add(
        "--deadline",
        type=number_above_0,
        help="time limit in seconds; unfinished examples do not count",
    )
    add_model_options(add)
    add("--show", type=count, default=3, help="number of completions to print")
    return parser.parse_args(argv)


def load_examples(args: argparse.Namespace) -> list:
    """Build prompts and references from the file by the two templates."""
    from nopad.trainer.evaluation import Example

    examples = []
    for number, row in read_rows(args.data):
        if args.limit is not None and len(examples) == args.limit:
            break
        location = f"{args.data}:{number}"
        prompt = fill_template("--prompt", args.prompt, row, location)
        messages = [{"role": "user", "content": prompt}]
        reference = fill_template("--reference", args.reference, row, location)
        examples.append(Example(messages if args.chat else prompt, reference))
    if not examples:
        raise ValueError(f"--data {args.data} has no examples")
    return examples


def read_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield the line number and the object of every line of a jsonl file, except blank lines."""
    number = 0
    with Path(os.path.expanduser(path)).open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"got a {type(row).__name__}")
                    yield number, row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is not a JSON object: {error}") from None


class _Null:
    """A null of the file, which is no text."""

    def __format__(self, _: str) -> str:
        raise ValueError("a column of it is null")


def fill_template(option: str, template: str, row: dict, location: str) -> str:
    """Insert a row's values into a template."""
    filled = {name: _Null() if value is None else value for name, value in row.items()}
    try:
        return template.replace("\\n", "\n").format(**filled)
    except KeyError as missing:
        raise ValueError(
            f"{location} has no {missing}, only {sorted(row)}: "
            "name the columns in --prompt and --reference"
        ) from None
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{option} {template!r} does not fit {location}: {error}") from None


def main(argv: list[str] | None = None) -> Report:
    """Evaluate; print some completions, a line per metric, and the metrics as JSON last."""
    args = parse_args(argv)
    examples = load_examples(args)  # wrong data and options are told before the model is loaded
    from nopad.inference import DataParallelEngine, Engine, SamplingParams
    from nopad.runtime import init_group
    from nopad.trainer.evaluation import GenerationEval, exact_match, regex_match, report_lines

    metrics: dict[str, Any] = {"exact": exact_match}
    if args.regex is not None:
        metrics["regex_match"] = regex_match(args.regex)
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, stop=args.stop, seed=args.seed
    )
    init_group()
    name = checkpoint_path(args.model)
    tokenizer = load_tokenizer(args.tokenizer or name)
    if args.chat:
        check_chat_template(tokenizer)
    model = load_model(name, args.dtype, args.device)
    evaluation = GenerationEval(
        DataParallelEngine(Engine(model, tokenizer)).generate,
        examples,
        metrics,
        params,
        deadline=args.deadline,
        num_samples=args.show,
        on_error="raise",
    )
    report = evaluation.run(0)
    if int(os.environ.get("RANK", "0")) == 0:
        print(printable("\n".join(report_lines(report)[1:])))
        width = max(map(len, report.metrics))
        print("\n".join(f"{name:{width}}  {value:.6g}" for name, value in report.metrics.items()))
        print(json.dumps(report.metrics))
        if report.metrics["eval/timed_out"] == len(examples):
            message = f"no example finished within {args.deadline} s: raise --deadline"
            print(f"evaluate_checkpoint: {message}", file=sys.stderr)
    return report


def run(argv: list[str] | None = None) -> int:
    """Run the recipe and return the exit status.

    1: an example failed, or none finished in time. 2: the evaluation could not start.
    """
    try:
        report = main(argv)
    except (ValueError, OSError, ImportError) as error:
        message = printable(" ".join(str(error).split()) or type(error).__name__)
        print(f"evaluate_checkpoint: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate_checkpoint: interrupted", file=sys.stderr)
        return 130
    from nopad.runtime import destroy_group

    destroy_group()
    return int(report.error is not None or not report.metrics["eval/examples"])


if __name__ == "__main__":
    sys.exit(run())
