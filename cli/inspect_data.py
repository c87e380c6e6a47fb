"""`nopad inspect DATA`: what packing does to a dataset, before any training.

    nopad inspect corpus.jsonl --tokenizer path/or/name --budget 8192
    nopad inspect tokens/ --budget 4096 --html map.html

Shows the lengths of the samples, the fill rate of packs for several budgets, the waste of padded
batches, a map of the first packs, and the first pack as text, with the [[tokens in the loss]].
"""

from __future__ import annotations

import argparse
import shutil
import sys
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..packing import IGNORE_INDEX, MAX_BUDGET, Pack, pack_lengths
from ..packing.encoding import ENCODE_BATCH, SkippedRows, encode_rows, raise_or_skip
from . import pack_map
from .load_pretrained import load_tokenizer
from .options import (
    add_data_options,
    as_cli_message,
    count,
    data_kwargs,
    parser,
    png_path,
    positive,
    writable_path,
)
from .terminal import printable

EMPTY = "the data is empty"
MAX_LENGTHS = 1 << 24
"""Samples to inspect at most, if their lengths are known."""
MAX_STREAM_PACKS = 256
"""Packs of tokens to read of a stream, to measure its first samples."""
MAX_TEXT_SAMPLES = 16
"""Samples to show of a pack as text."""


def main(argv: list[str]) -> int:
    """Inspect a dataset; return the exit status."""
    args = _parse_args(argv)
    if not args.data:
        raise ValueError("the name of the data is empty: pass a file or a folder")
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    try:
        return _inspect(args, tokenizer)
    except ValueError as error:
        raise ValueError(as_cli_message(error)) from error


def _inspect(args: argparse.Namespace, tokenizer: Any) -> int:
    from ..packing import PackedDataset

    data = PackedDataset(
        args.data,
        tokenizer=tokenizer,
        text_column=args.text_column,
        budget=args.budget,
        overflow=args.overflow,
        seed=args.seed,
        rank=0,
        world_size=1,
        **data_kwargs(args),
    )
    skipped = data.skipped
    lengths, total = measure_lengths(data, skipped)
    reason = printable(as_cli_message(skipped.reasons[0])) if skipped.rows else ""
    if not len(lengths):
        raise ValueError(f"every row was skipped; the first: {reason}" if reason else EMPTY)
    print(_summary(lengths, total))
    if reason:
        print(f"{skipped.rows:,} rows skipped; the first: {reason}")
    print(histogram(lengths), budget_table(lengths, args.budget, args.overflow), sep="\n\n")
    print(f"\npadded batches of 32 in random order would be {padding_waste(lengths):.1%} padding\n")
    packs = list(islice(data, max(args.packs, args.decode)))
    shown = [pack.lengths for pack in packs[: args.packs]]
    width = max(20, shutil.get_terminal_size().columns - 32)
    print(pack_map.draw_packs(shown, args.budget, width, color=pack_map.has_color(sys.stdout)))
    if args.html:
        pack_map.write_html(args.html, shown, args.budget)
    if args.png:
        pack_map.write_png(args.png, shown, args.budget)
    for pack in packs[: args.decode]:
        print("\n" + pack_text(pack, tokenizer))
    return 0


def _parse_args(argv: list[str]) -> argparse.Namespace:
    command = parser("inspect", __doc__)
    add = command.add_argument
    add("data", help="jsonl, parquet, text or token files, a saved `datasets` folder or a hub name")
    add("--tokenizer", help="folder or hub name; not needed for token ids")
    add("--text-column", default="text", help="column with the text")
    add_data_options(add)
    add("--budget", type=positive, default=8192, help="maximum tokens per pack")
    add("--overflow", default="split", choices=["split", "truncate", "drop", "error"],
        help="what to do with samples longer than a pack")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the order")
    add("--packs", type=count, default=12, help="packs on the map")
    add("--decode", type=count, default=1, help="packs to show as text")
    add("--html", type=writable_path, help="write the map to this HTML file, too")
    add("--png", type=png_path, help="write the map to this PNG file, too (matplotlib)")
    return command.parse_args(argv)


def measure_lengths(data: Any, skipped: SkippedRows) -> tuple[np.ndarray, int | None]:
    """Return the lengths of the first samples, and the number of samples; None if unknown.

    skipped: counts the rows of a stream that cannot be used.
    """
    if data.lengths is not None:
        return np.asarray(data.lengths[:MAX_LENGTHS], np.int64), len(data.lengths)
    stream, lengths, tokens = data.stream_settings, [], 0
    rows, counted = stream.sources[0].read(0, 1), skipped if stream.skip_errors else None
    max_tokens = MAX_STREAM_PACKS * stream.packer["budget"]
    while tokens < max_tokens and (batch := list(islice(rows, ENCODE_BATCH))):
        samples = raise_or_skip(encode_rows(batch, stream.encoder), counted)
        more = [len(sample) for sample in samples]
        lengths, tokens = lengths + more, tokens + sum(more)
    is_all = next(rows, None) is None
    return np.array(lengths, np.int64), len(lengths) if is_all else None


def _summary(lengths: np.ndarray, total: int | None) -> str:
    median, p99 = np.percentile(lengths, [50, 99]).astype(int).tolist()
    first = "" if total == len(lengths) else "the first "
    of = f" of {total:,}" if first and total is not None else ""
    return (
        f"{first}{len(lengths):,}{of} samples, {lengths.sum():,} tokens; "
        f"length: median {median}, p99 {p99}, max {lengths.max()}"
    )


def histogram(lengths: np.ndarray, width: int = 40) -> str:
    """Draw the number of samples between powers of two.

    >>> print(histogram(np.array([1, 2, 3, 9]), width=4))
        1 -     1 ██          1
        2 -     3 ████        2
        4 -     7             0
        8 -    15 ██          1
    """
    exponents = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents)
    lines = []
    for e in range(int(exponents.min()), len(counts)):
        bar = "█" * round(width * counts[e] / counts.max())
        lines.append(f"{1 << e:5} - {(2 << e) - 1:5} {bar:{width}} {counts[e]:8,}")
    return "\n".join(lines)


def budget_table(lengths: np.ndarray, budget: int, overflow: Any) -> str:
    """Return a table of packs, fill rate and too long samples for several budgets."""
    table_rows = ["   budget     packs     fill  samples/pack  longer than a pack"]
    for each in (budget // 4, budget // 2, budget, budget * 2):
        num_long = int((lengths > each).sum())
        if not 1 <= each <= MAX_BUDGET or (overflow == "error" and num_long):
            continue
        plan = pack_lengths(lengths, each, overflow=overflow)
        packed, mark = int(plan.lengths.sum()), "*" if each == budget else " "
        fill, per_pack = "-", "-"
        if len(plan):
            fill = f"{packed / (len(plan) * each):.2%}"
            per_pack = f"{len(plan.lengths) / len(plan):.1f}"
        table_rows.append(f"{mark}{each:8,} {len(plan):9,} {fill:>8} {per_pack:>13} {num_long:19,}")
    return "\n".join(table_rows)


def padding_waste(lengths: np.ndarray, batch_size: int = 32) -> float:
    """Return the fraction of padding in padded batches of random samples.

    >>> padding_waste(np.array([1, 2]), batch_size=2)
    0.25
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return float(1 - lengths.sum() / (longest * sizes).sum())


def pack_text(pack: Pack, tokenizer: Any) -> str:
    """Return a pack's samples as text, with the [[tokens in the loss]] in brackets."""
    lines = [f"pack {pack.index}: {len(pack.tokens)} tokens, {pack.num_label_tokens} in the loss"]
    for a, b in islice(pairwise(pack.cu_seqlens.tolist()), MAX_TEXT_SAMPLES):
        in_loss = pack.labels[a:b] != IGNORE_INDEX
        edges = [0, *(np.flatnonzero(np.diff(in_loss)) + 1).tolist(), int(b - a)]
        text = ""
        for start, end in pairwise(edges):
            span = _decode(pack.tokens[a + start : a + end], tokenizer)
            text += f"[[{span}]]" if in_loss[start] else span
        lines.append(f"  {b - a:5} tokens  {text}")
    rest = len(pack.cu_seqlens) - 1 - MAX_TEXT_SAMPLES
    return "\n".join([*lines, f"  ... and {rest} more samples"] if rest > 0 else lines)


def _decode(ids: np.ndarray, tokenizer: Any, max_chars: int = 160) -> str:
    text = " ".join(map(str, ids.tolist())) if tokenizer is None else tokenizer.decode(ids)
    text = printable(text.replace("\n", "\\n"))
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]} ... {text[-max_chars // 2 :]}"
