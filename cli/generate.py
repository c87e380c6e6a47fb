"""`nopad generate MODEL`: complete prompts with any Hugging Face checkpoint through the engine.

    nopad generate path/to/checkpoint --prompt "Once upon a time"
    nopad generate path/to/checkpoint --file prompts.txt --max-tokens 64 --output done.jsonl
    nopad generate path/to/checkpoint --file chats.jsonl --temperature 0.8 --n 4 --stats

A file holds one prompt a line, or, named .jsonl, objects with "prompt" (text or token ids) or
"messages". One JSON object a completion comes out, in the prompts' order. Exit status: 0, 1 if
a request failed, 2 if the command could not start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..inference import Completion, Engine, SamplingParams

_KNOBS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n", "logprobs")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(argv)
    prompts = [*options.prompt, *(_read(options.file) if options.file else ())]
    if not prompts:
        raise ValueError("no prompts: give --prompt or --file")
    params = SamplingParams(
        stop=tuple(options.stop), **{name: getattr(options, name) for name in _KNOBS}
    )
    engine = _engine(options)
    done = engine.generate(prompts, params, deadline=options.deadline, progress=options.progress)
    lines = "".join(json.dumps(record) + "\n" for record in _records(done))
    if options.output:
        Path(options.output).write_text(lines)
    else:
        sys.stdout.write(lines)
    if options.stats:
        print(json.dumps(engine.stats.summary(), indent=1), file=sys.stderr)
    if options.trace:
        engine.trace.write_chrome(options.trace)
    return int(any(completion.error for completion in done))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nopad generate", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("model", help="a checkpoint: a folder, or a name on the hub")
    add("--prompt", action="append", default=[], help="a prompt; may be given again")
    add("--file", type=Path, help="prompts, one a line, or .jsonl")
    add("--output", help="where to write; default: standard output")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--min-p", type=float, default=0.0)
    add("--max-tokens", type=int, default=64)
    add("--stop", action="append", default=[], help="a string that ends the text")
    add("--seed", type=int, default=0)
    add("--n", type=int, default=1, help="completions per prompt")
    add("--logprobs", type=int, help="report log-probabilities, and this many alternatives")
    add("--deadline", type=float, help="seconds after which unfinished requests return")
    add("--device", help="cuda, cpu, ...; default: cuda if there is one")
    add("--dtype", default="auto", help="of the weights: auto, float32, bfloat16, ...")
    add("--memory", type=_memory, help="bytes, or a share of free memory, for the engine")
    add("--max-running", type=int, help="requests in one step")
    add("--trace", help="write what happened to each request, for Perfetto")
    add("--stats", action="store_true", help="print figures to standard error")
    add("--progress", action="store_true", help="show a progress bar")
    return parser


def _engine(options: argparse.Namespace) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"cannot load {options.model}: {str(error).splitlines()[0]}") from None
    more = {} if options.memory is None else {"memory": options.memory}
    return Engine(model.to(device), tokenizer, max_running=options.max_running, **more)


def _memory(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _read(path: Path) -> Iterator[Any]:
    """Prompts of a file."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if path.suffix != ".jsonl":
                yield line.rstrip("\n")
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
            if not isinstance(record, dict) or not record.keys() & {"prompt", "messages"}:
                raise ValueError(f'{path}, line {number}: has neither "prompt" nor "messages"')
            yield record.get("prompt", record.get("messages"))


def _records(done: list[Completion]) -> Iterator[dict[str, Any]]:
    for index, completion in enumerate(done):
        for sibling, one in enumerate((completion, *completion.siblings)):
            record = {"index": index, "sibling": sibling, "text": one.text, "tokens": one.tokens}
            record["finish_reason"] = one.finish_reason
            if one.logprobs is not None:
                record["logprobs"] = [entry.logprob for entry in one.logprobs]
            if one.error is not None:
                record["error"] = one.error
            yield record
