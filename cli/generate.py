"""`nopad generate MODEL`: complete prompts with any Hugging Face checkpoint through the engine.

    nopad generate path/to/checkpoint --prompt "Once upon a time" --text
    nopad generate path/to/checkpoint --file prompts.txt --max-tokens 64 --output done.jsonl
    nopad generate path/to/checkpoint --file chats.jsonl --temperature 0.8 --n 4 --stats
    cat questions.txt | nopad generate path/to/checkpoint --file - --chat

A file holds one prompt a line; named .jsonl (or with --jsonl), objects with "prompt" (text or
token ids) or "messages", and with settings of their own such as "max_tokens"; named .json, a list
of those. One JSON object a completion comes out, in the prompts' order. Exit status: 0, 1 if a
request failed, 2 if the command could not start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .checkpoints import check_chat_template, checkpoint_path, load_model, load_tokenizer
from .options import add_model_options, as_cli_message, count, parser, writable_path
from .prompt_file import Asked, read_prompts

if TYPE_CHECKING:
    from ..inference import Completion, Engine, SamplingParams

_KNOBS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "logprobs", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _generate(options)
    except ValueError as error:
        raise ValueError(as_cli_message(error)) from error


def _generate(options: argparse.Namespace) -> int:
    asked = _asked(options)
    params = _params(options, asked)
    prompts = [prompt for prompt, _ in asked]
    engine = _engine(options, prompts, any(one.stop for one in params))
    done = engine.generate(prompts, params, deadline=options.deadline, progress=options.progress)
    text = "".join(_lines(done, options.text))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    if options.stats:
        print(json.dumps(_rounded(engine.stats.summary()), indent=1), file=sys.stderr)
    if options.trace:
        engine.trace.write_chrome(options.trace)
    if options.plot:
        engine.stats.plot(options.plot)
    return int(any(completion.error for completion in done))


def _parser() -> argparse.ArgumentParser:
    made = parser("generate", __doc__)
    add = made.add_argument
    add("model", help="a checkpoint: a folder, or a name on the hub")
    add("--prompt", action="append", help="a prompt; may be given again")
    add("--file", help="prompts, one a line, .jsonl or .json; - reads lines of standard input")
    add("--jsonl", action="store_true", help="the lines of --file are JSON, whatever its name")
    add("--chat", action="store_true", help="put texts into the tokenizer's chat template")
    add("--output", type=writable_path, help="where to write; without it, standard output")
    add("--text", action="store_true", help="write only the texts, one after the other")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest that sum up to this")
    add("--top-k", type=int, default=0, help="draw from so many; 0: from all")
    add("--min-p", type=float, default=0.0, help="leave out what is less likely than this x best")
    add("--max-tokens", type=int, default=64, help="longest completion")
    add("--min-tokens", type=int, default=0, help="no end before so many")
    add("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the end of a text")
    add("--presence-penalty", type=float, default=0.0, help="taken from tokens that came before")
    add("--frequency-penalty", type=float, default=0.0, help="the same for each time they came")
    add("--repetition-penalty", type=float, default=1.0, help="divides what came, prompt included")
    add("--seed", type=int, default=0, help="of the draws")
    add("--n", type=int, default=1, help="completions per prompt")
    add("--logprobs", type=count, help="report log-probabilities, and this many alternatives")
    add("--deadline", type=float, help="seconds after which unfinished requests return")
    add_model_options(add)
    add("--memory", type=_memory, help="bytes, or a share of free memory, for the engine")
    add("--max-num-seqs", type=int, help="requests in one step")
    add("--trace", type=writable_path, help="write what happened to each request, for Perfetto")
    add("--plot", type=writable_path, help="draw running and waiting requests over time, as SVG")
    add("--stats", action="store_true", help="print figures to standard error")
    add("--progress", action="store_true", help="show a progress bar")
    return made


def _asked(options: argparse.Namespace) -> list[Asked]:
    """All prompts, as chats if that was asked for."""
    given: list[Asked] = [(prompt, {}) for prompt in options.prompt or ()]
    if options.file:
        given += read_prompts(options.file, options.jsonl)
    if not given:
        raise ValueError("no prompts: give --prompt or --file")
    if not options.chat:
        return given
    return [([{"role": "user", "content": p}] if isinstance(p, str) else p, k) for p, k in given]


def _params(options: argparse.Namespace, asked: list[Asked]) -> list[SamplingParams]:
    """What the options say, and over it what a prompt's own record does."""
    from ..inference import SamplingParams

    common = {name: getattr(options, name) for name in _KNOBS}
    for_all = SamplingParams(**common)
    params = [SamplingParams(**common | own) if own else for_all for _, own in asked]
    for one in params:
        if one.n > 1 and one.is_greedy:
            raise ValueError(f"--n {one.n} of the same text: raise --temperature")
    return params


def _engine(options: argparse.Namespace, prompts: list[Any], stops: bool) -> Engine:
    from ..inference import Engine

    name = checkpoint_path(options.model)
    try:
        tokenizer = load_tokenizer(options.tokenizer or name)
    except ValueError:
        if options.tokenizer or stops or not all(map(_is_ids, prompts)):
            raise
        tokenizer = None
    if options.chat:
        check_chat_template(tokenizer)
    model = load_model(name, options.dtype, options.device)
    more = {} if options.memory is None else {"memory": options.memory}
    return Engine(model, tokenizer, max_num_seqs=options.max_num_seqs, seed=options.seed, **more)


def _memory(text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: bytes, or a share such as 0.5 of what is free"
        ) from None


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


def _lines(done: list[Completion], only_text: bool) -> Iterator[str]:
    for index, completion in enumerate(done):
        for sample_index, one in enumerate((completion, *completion.others)):
            if only_text:
                yield f"{one.text if one.error is None else f'[{one.error}]'}\n"
            else:
                yield json.dumps(_record(index, sample_index, one), ensure_ascii=False) + "\n"


def _record(index: int, sample_index: int, one: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, "sample_index": sample_index, "text": one.text}
    record |= {"token_ids": one.token_ids, "finish_reason": one.finish_reason}
    if one.logprobs is not None:
        record["logprobs"] = [entry.logprob for entry in one.logprobs]
        if any(entry.top_logprobs for entry in one.logprobs):
            record["top_logprobs"] = [entry.top_logprobs for entry in one.logprobs]
    if one.error is not None:
        record["error"] = one.error
    return record


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in figures.items()}
