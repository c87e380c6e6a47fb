"""`nopad generate MODEL`: complete prompts with any Hugging Face checkpoint, through the engine.

    nopad generate path/to/checkpoint --prompt "Once upon a time"
    nopad generate path/to/checkpoint --file prompts.txt --max-tokens 64 --output done.jsonl
    nopad generate path/to/checkpoint --file chats.jsonl --temperature 0.8 --n 4 --stats
    cat questions.txt | nopad generate path/to/checkpoint --file - --chat

A text file has one prompt per line. A .jsonl file (or --jsonl) has one JSON object per line, with
"prompt" (text or token ids) or "messages", and optionally sampling parameters such as "max_tokens".
A .json file is a list of prompts or such objects. The model adds a new assistant turn after the
messages of a chat, even if the last turn is the assistant's: remove answers that the model should
give. On a terminal, prompts and completions are shown as text; a pipe or --output gets one JSON
object per completion, with its prompt, in the order of the prompts. Exit status: 0 on success, 1 if
a request failed, 2 if the command could not start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .load_pretrained import check_chat_template, checkpoint_path, load_model, load_tokenizer
from .options import (
    add_model_argument,
    add_model_options,
    as_cli_message,
    count,
    memory_size,
    number_above_0,
    parser,
    plot_path,
    positive,
    writable_path,
)
from .prompt_file import PromptEntry, read_prompts
from .terminal import console, printable, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..inference import Completion, Engine, SamplingParams


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        return _generate(args)
    except ValueError as error:
        raise ValueError(as_cli_message(error)) from error


def _generate(args: argparse.Namespace) -> int:
    entries = _read_entries(args)
    params = _sampling_params(args, entries)
    prompts = [prompt for prompt, _ in entries]
    engine = _engine(args, prompts, uses_stop_strings=any(each.stop for each in params))
    with progress("generating", len(prompts)) as advance:
        completions = engine.generate(prompts, params, deadline=args.deadline, progress=advance)
    out = console()
    if args.output:
        _write_output(args.output, "".join(_output_lines(prompts, completions, args.text)))
    elif out.is_terminal and not args.text:
        _print_completions(out, prompts, completions)
    else:
        sys.stdout.write(printable("".join(_output_lines(prompts, completions, args.text))))
    if args.stats:
        print(json.dumps(_rounded(engine.stats.summary()), indent=1), file=sys.stderr)
    if args.trace:
        engine.trace.write_chrome(args.trace)
    if args.plot:
        engine.stats.plot(args.plot)
    return int(any(each.error for done in completions for each in (done, *done.others)))


def _write_output(path: Path, text: str) -> None:
    """Write the completions; if the file cannot be written, print them instead."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stdout.write(printable(text))
        message = f"--output {path}: {error.strerror}; the completions are on standard output"
        raise ValueError(message) from None


def _parser() -> argparse.ArgumentParser:
    command = parser("generate", "MODEL --prompt TEXT [options]", __doc__)
    add = command.add_argument
    add_model_argument(add, "checkpoint folder or hub name")
    add("--prompt", action="append", help="a prompt; can be repeated")
    add("--file", help="file of prompts: text, .jsonl or .json; - reads standard input")
    add("--jsonl", action="store_true", help="read --file as JSON lines, with any suffix")
    add("--chat", action="store_true", help="apply the tokenizer's chat template to text prompts")
    add("--output", type=writable_path, help="output file; default: standard output")
    add("--text", action="store_true",
        help="write only the texts, without JSON; control characters are escaped on standard "
        "output, not in a file")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy decoding")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the top tokens that add up to this probability",
    )
    add("--top-k", type=int, default=0, help="sample from this many top tokens; 0: from all")
    add("--min-p", type=float, default=0.0,
        help="exclude tokens below this fraction of the top token's probability")  # fmt: skip
    add("--max-tokens", type=int, default=64, help="generate at most this many tokens")
    add("--min-tokens", type=int, default=0, help="generate at least this many tokens")
    add("--stop", action="append", default=[], help="string that ends the text; can be repeated")
    add("--ignore-eos", action="store_true", help="continue after the eos token")
    add("--presence-penalty", type=float, default=0.0,
        help="subtracted from the logits of tokens that were generated")  # fmt: skip
    add("--frequency-penalty", type=float, default=0.0,
        help="subtracted once for each time a token was generated")  # fmt: skip
    add("--repetition-penalty", type=float, default=1.0,
        help="above 1, makes tokens of the prompt and output less likely")  # fmt: skip
    add("--seed", type=int, default=0,
        help="seed of the run, as Engine(seed=): each prompt draws its own numbers, also one that "
        "is given twice; a row's own \"seed\" is that of SamplingParams (default: 0)")  # fmt: skip
    add("--n", type=int, default=1, help="completions per prompt")
    add("--logprobs", type=count, help="write log-probabilities, and this many alternatives")
    add("--deadline", type=number_above_0, help="seconds after which requests return unfinished")
    add_model_options(add)
    add(
        "--memory",
        type=memory_size,
        help="memory of the engine: bytes, or a fraction of free memory",
    )
    add("--max-num-seqs", type=positive, help="maximum number of requests per step")
    add("--trace", type=writable_path, help="write the events of each request, for Perfetto")
    add("--plot", type=plot_path, help="plot running and waiting requests: .svg, .png or .pdf")
    add("--stats", action="store_true", help="print engine statistics to standard error")
    return command


def _read_entries(args: argparse.Namespace) -> list[PromptEntry]:
    """Return all prompts, as chats with --chat."""
    if args.jsonl and not args.file:
        raise ValueError("--jsonl needs --file")
    entries: list[PromptEntry] = [(prompt, {}) for prompt in args.prompt or ()]
    if args.file:
        entries += read_prompts(args.file, args.jsonl)
    if not entries:
        raise ValueError("no prompts: pass --prompt or --file")
    if not args.chat:
        return entries
    return [([{"role": "user", "content": p}] if isinstance(p, str) else p, k) for p, k in entries]


def _sampling_params(args: argparse.Namespace, entries: list[PromptEntry]) -> list[SamplingParams]:
    """Return the options as parameters, overridden by those in a prompt's own entry."""
    from ..inference import SamplingParams

    names = {field.name for field in fields(SamplingParams)} - {"seed"}  # --seed: of the engine
    common = {name: value for name, value in vars(args).items() if name in names}
    shared = SamplingParams(**common)
    params = []
    for index, (_, own) in enumerate(entries):
        try:
            each = SamplingParams(**common | own) if own else shared
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        if each.n > 1 and each.is_greedy:
            where = f"prompt {index}: n" if "n" in own else "--n"
            raise ValueError(f"{where} {each.n} would repeat the same text: raise --temperature")
        params.append(each)
    return params


def _engine(args: argparse.Namespace, prompts: list[Any], uses_stop_strings: bool) -> Engine:
    from ..inference import Engine

    name = checkpoint_path(args.model)
    try:
        tokenizer = load_tokenizer(args.tokenizer or name)
    except ValueError:
        needs_text = args.tokenizer or args.text or args.chat or uses_stop_strings
        if needs_text or not all(map(_is_token_ids, prompts)):
            raise
        tokenizer = None
    if args.chat:
        check_chat_template(tokenizer)
    model = load_model(name, args.dtype, args.device)
    memory = {} if args.memory is None else {"memory": args.memory}
    return Engine(model, tokenizer, max_num_seqs=args.max_num_seqs, seed=args.seed, **memory)


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


def _output_lines(
    prompts: list[Any], completions: list[Completion], only_text: bool
) -> Iterator[str]:
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for sample_index, each in enumerate((completion, *completion.others)):
            if only_text:
                yield f"{each.text if each.error is None else f'[{each.error}]'}\n"
            else:
                record = {"index": index, "sample_index": sample_index, "prompt": prompt}
                yield json.dumps(record | _record(each), ensure_ascii=False) + "\n"


def _print_completions(out: Console, prompts: list[Any], completions: list[Completion]) -> None:
    """Print prompts and completions for people."""
    from rich.text import Text

    for prompt, completion in zip(prompts, completions, strict=True):
        for each in (completion, *completion.others):
            text = Text(printable(_prompt_text(prompt)), "dim")
            if each.error is not None:
                text.append(printable(f" [{each.error}]"), "red")
            else:
                said = " ".join(map(str, each.token_ids)) if each.text is None else each.text
                text.append(printable(said), "bold")
            out.print(text)
            out.print(f"{len(each.token_ids)} tokens, {each.finish_reason}\n", style="cyan")


def _prompt_text(prompt: Any) -> str:
    """Format a prompt for people: the text, the turns of a chat, or ids."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], dict):
        turns = (f"{turn.get('role')}: {turn.get('content')}\n" for turn in prompt)
        return "".join(turns) + "assistant: "
    return " ".join(map(str, prompt)) + " "


def _record(completion: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {"text": completion.text, "token_ids": completion.token_ids}
    record["finish_reason"] = completion.finish_reason
    if completion.logprobs is not None:
        record["logprobs"] = [entry.logprob for entry in completion.logprobs]
        if any(entry.top_logprobs for entry in completion.logprobs):
            record["top_logprobs"] = [entry.top_logprobs for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        known = completion.prompt_logprobs
        record["prompt_logprobs"] = [None if entry is None else entry.logprob for entry in known]
        if any(entry is not None and entry.top_logprobs for entry in known):
            record["prompt_top_logprobs"] = [entry and entry.top_logprobs for entry in known]
    if completion.error is not None:
        record["error"] = completion.error
    return record


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in figures.items()}
