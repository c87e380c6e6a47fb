"""Evaluate a saved checkpoint by generation: prompts with references from a file, and metrics.

    python recipes/evaluate_checkpoint.py --model runs/pretrain-1/last --data test.jsonl \\
        --prompt "Question: {question}\\nAnswer:" --reference "{answer}" --regex "#### (-?[0-9.,]+)"

The very evaluation that runs inside training (`GenerationEval`), so its numbers are the same. More
processes share the prompts: `torchrun --nproc_per_node 4 recipes/evaluate_checkpoint.py ...`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nopad.cli import (
    HelpFormatter,
    add_model_options,
    check_chat_template,
    checkpoint_path,
    load_model,
    load_tokenizer,
    positive,
)

if TYPE_CHECKING:
    from nopad.trainer.evaluation import Report


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description="Evaluate a saved checkpoint by generation.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder or hub name")
    add("--data", type=Path, required=True, help="jsonl file")
    add("--prompt", default="{prompt}", help="how a line becomes a prompt")
    add("--reference", default="{completion}", help="and what its completion is held against")
    add("--regex", help="compare what this finds in both, besides exact match")
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--limit", type=positive, help="lines to read")
    add("--max-tokens", type=positive, default=256, help="longest completion")
    add("--stop", action="append", default=[], help="text that ends a completion; may be repeated")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--seed", type=int, default=0, help="of the draws")
    add("--deadline", type=float, help="seconds after which the rest does not count")
    add_model_options(add)
    add("--show", type=int, default=3, help="completions to print")
    return parser.parse_args(argv)


def examples(args: argparse.Namespace) -> list:
    """Prompts and references, by the two templates."""
    from nopad.trainer.evaluation import Example

    found = []
    for number, row in rows(args.data):
        if args.limit is not None and len(found) == args.limit:
            break
        where = f"{args.data}:{number}"
        prompt = filled("--prompt", args.prompt, row, where)
        message = [{"role": "user", "content": prompt}]
        reference = filled("--reference", args.reference, row, where)
        found.append(Example(message if args.chat else prompt, reference))
    return found


def rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The objects of a jsonl file, with the numbers of their lines; blank ones are passed over."""
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, dict(json.loads(line))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no JSON object: {error}") from None


def filled(option: str, template: str, row: dict, where: str) -> str:
    """The template with a row's values in it."""
    try:
        return template.replace("\\n", "\n").format(**row)
    except KeyError as missing:
        raise ValueError(
            f"{where} has no {missing}: it has {sorted(row)}; "
            "say how to read it with --prompt and --reference"
        ) from None
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{option} {template!r} does not fit {where}: {error}") from None


def main(argv: list[str] | None = None) -> Report:
    """Evaluate as the options say; print samples, a line for each metric, and JSON last."""
    args = options(argv)
    given = examples(args)
    from nopad.inference import DataParallelEngine, Engine, SamplingParams
    from nopad.runtime import init_group
    from nopad.trainer.evaluation import GenerationEval, exact_match, extracted, report_lines

    init_group()
    name = checkpoint_path(args.model)
    tokenizer = load_tokenizer(args.tokenizer or name)
    if args.chat:
        check_chat_template(tokenizer)
    model = load_model(name, args.dtype, args.device)
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, stop=args.stop, seed=args.seed
    )
    metrics = {"exact": exact_match}
    if args.regex:
        metrics["extracted"] = extracted(args.regex)
    evaluation = GenerationEval(
        DataParallelEngine(Engine(model, tokenizer)).generate,
        given,
        metrics,
        params,
        deadline=args.deadline,
        num_samples=args.show,
        on_error="raise",
    )
    report = evaluation.run(0)
    if int(os.environ.get("RANK", "0")) == 0:
        print(*report_lines(report)[1:], sep="\n")
        width = max(map(len, report.metrics))
        print("\n".join(f"{name:{width}}  {value:.6g}" for name, value in report.metrics.items()))
        print(json.dumps(report.metrics))
        if report.metrics["eval/unfinished"] == len(given):
            late = f"nothing was finished in {args.deadline} s: raise --deadline"
            print(f"evaluate_checkpoint: {late}", file=sys.stderr)
    return report


def run(argv: list[str] | None = None) -> int:
    """Run the recipe; give the exit status.

    1 where an example failed or none was finished in time, 2 where none could run.
    """
    try:
        report = main(argv)
    except (ValueError, OSError) as error:
        print(f"evaluate_checkpoint: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    from nopad.runtime import destroy_group

    destroy_group()
    return int(report.error is not None or not report.metrics["eval/examples"])


if __name__ == "__main__":
    sys.exit(run())
