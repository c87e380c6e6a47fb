"""`nopad tokenize SOURCE --out DIR`: tokenize data once, for all runs that train on it.

    nopad tokenize corpus.jsonl --tokenizer path/or/name --out tokens/
    nopad pretrain MODEL --data tokens/

Writes the tokens to a folder or URL that is read wherever data is, without a tokenizer and with
known lengths. A command that was interrupted continues when it is run again. The tasks of a job
array write parts, and the same command without --part completes them:

    nopad tokenize ... --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
"""

from __future__ import annotations

import argparse
import re

from .load_pretrained import add_chat_template_option, load_tokenizer, set_chat_template
from .options import add_data_options, as_cli_message, data_kwargs, parser, positive
from .terminal import console, printable


def main(argv: list[str]) -> int:
    """Tokenize data; return the exit status."""
    args = _parse_args(argv)
    from ..packing import tokenize

    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    if args.chat_template is not None:
        if tokenizer is None:
            raise ValueError("--chat-template needs --tokenizer")
        set_chat_template(tokenizer, args.chat_template)
    try:
        manifest = tokenize(
            args.data,
            args.out,
            tokenizer=tokenizer,
            processes=args.processes,
            engine=args.engine,
            part=args.part,
            **data_kwargs(args),
        )
    except ValueError as error:
        raise ValueError(as_cli_message(error, part="part")) from error
    out = console()
    if manifest is None:
        out.print(f"part {args.part[0]} of {args.part[1]} is in {printable(args.out)}")
        return 0
    if not manifest["documents"]:
        skipped = [as_cli_message(reason) for reason in manifest["skipped"]["reasons"][:1]]
        why = f"every row was skipped; the first: {skipped[0]}" if skipped else "the data is empty"
        raise ValueError(f"{args.data}: {why}")
    count = len(manifest["shards"])
    out.print(
        f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens in "
        f"{count:,} shard{'s' * (count != 1)}: {printable(args.out)}"
    )
    if manifest["skipped"]["rows"]:
        first = printable(as_cli_message(manifest["skipped"]["reasons"][0]))
        out.print(f"{manifest['skipped']['rows']:,} rows skipped; the first: {first}")
    return 0


def _parse_args(argv: list[str]) -> argparse.Namespace:
    command = parser("tokenize", "SOURCE --out DIR [options]", __doc__)
    add = command.add_argument
    what = "jsonl, parquet, text or token files, a saved `datasets` folder or a hub name"
    add("data", metavar="SOURCE", help=what)
    add("--out", required=True, help="folder or URL to write to")
    add("--tokenizer", help="folder or hub name; not needed for token ids")
    add_chat_template_option(add)
    add_data_options(add)
    add("--processes", type=positive, help="processes, or Ray tasks at a time; default: all cores")
    add("--engine", choices=("local", "ray"), default="local", help="what runs the work")
    add("--part", type=_part, metavar="I/N", help="write only part I of N, counted from 0")
    return command.parse_args(argv)


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: pass I/N, with I from 0 to N - 1")
    return int(match[1]), int(match[2])
