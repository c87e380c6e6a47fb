"""`nopad inspect DATA`: what packing does to a data set, before any training.

    nopad inspect corpus.jsonl --tokenizer path/or/name --budget 8192
    nopad inspect tokens/ --budget 4096 --html map.html

Shows how long the samples are, how full packs of several budgets get, what padded batches would
waste, a map of the first packs, and the first of them decoded with what counts for the loss.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..packing import IGNORE_INDEX, Pack, pack_lengths
from ..packing.encoding import ENCODE_BATCH, SkippedRows, encode_rows, raise_or_skip
from . import pack_map
from .checkpoints import load_tokenizer
from .options import count, in_options, new_file, parser, reading_choices, reading_options

MOST_LENGTHS = 1 << 24
"""Samples that are looked at, where their lengths are known."""
MOST_PACKS = 256
"""Whose tokens are read of a stream, to measure its first samples."""
MOST_SAMPLES = 16
"""Of a pack that is shown as text."""


def main(argv: list[str]) -> int:
    """Inspect a data set; return the exit status."""
    args = _options(argv)
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    try:
        return _inspect(args, tokenizer)
    except ValueError as error:
        raise ValueError(in_options(error)) from error


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
        **reading_choices(args),
    )
    skipped = data.skipped
    lengths, total = measured(data, skipped)
    print(_summary(lengths, total))
    if skipped.rows:
        print(f"{skipped.rows:,} rows left out, the first: {in_options(skipped.reasons[0])}")
    print(histogram(lengths), budgets(lengths, args.budget, args.overflow), sep="\n\n")
    print(f"\npadded batches of 32 in random order would waste {padding_waste(lengths):.1%}\n")
    packs = list(islice(data, max(args.packs, args.decode)))
    shown = [pack.lengths for pack in packs[: args.packs]]
    width = max(20, shutil.get_terminal_size().columns - 32)
    print(pack_map.terminal(shown, args.budget, width, colour=sys.stdout.isatty()))
    if args.html:
        pack_map.write_html(args.html, shown, args.budget)
    if args.png:
        pack_map.write_png(args.png, shown, args.budget)
    for pack in packs[: args.decode]:
        print("\n" + decoded(pack, tokenizer))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("inspect", __doc__)
    add = made.add_argument
    add("data", help="jsonl, parquet, text, token files, saved `datasets` folder or hub name")
    add("--tokenizer", help="folder or hub name; not needed for token ids")
    add("--text-column", default="text", help="column that holds the text")
    reading_options(add)
    add("--budget", type=int, default=8192, help="tokens a pack may hold")
    add("--overflow", default="split", choices=["split", "truncate", "drop", "error"],
        help="what becomes of samples longer than a pack")  # fmt: skip
    add("--seed", type=int, default=0, help="of the order")
    add("--packs", type=count, default=12, help="packs on the map")
    add("--decode", type=count, default=1, help="packs to show as text")
    add("--html", type=new_file, help="write the map there too")
    add("--png", type=new_file, help="write the map there too")
    return made.parse_args(argv)


def measured(data: Any, skipped: SkippedRows) -> tuple[np.ndarray, int | None]:
    """The lengths of the first samples, and how many there are; None where nobody knows.

    skipped: where rows of a stream are counted that had to be left out.
    """
    if data.lengths is not None:
        return np.asarray(data.lengths[:MOST_LENGTHS], np.int64), len(data.lengths)
    stream, lengths, tokens = data.stream_settings, [], 0
    rows, counted = stream.sources[0].read(0, 1), skipped if stream.skip_errors else None
    while tokens < MOST_PACKS * stream.packer["budget"] and (
        batch := list(islice(rows, ENCODE_BATCH))
    ):
        found = [len(one) for one in raise_or_skip(encode_rows(batch, stream.encoder), counted)]
        lengths, tokens = lengths + found, tokens + sum(found)
    over = next(rows, None) is None
    return np.array(lengths, np.int64), len(lengths) if over else None


def _summary(lengths: np.ndarray, total: int | None) -> str:
    if not len(lengths):
        raise ValueError("there is nothing to inspect: the data is empty")
    middle, late = np.percentile(lengths, [50, 99]).astype(int).tolist()
    first = "" if total == len(lengths) else "the first "
    of = f" of {total:,}" if first and total is not None else ""
    return (
        f"{first}{len(lengths):,}{of} samples, {lengths.sum():,} tokens; "
        f"length: median {middle}, p99 {late}, longest {lengths.max()}"
    )


def histogram(lengths: np.ndarray, width: int = 40) -> str:
    """Draw how many samples fall between powers of two.

    >>> print(histogram(np.array([1, 2, 3, 9]), width=4))
        1 -     1 ██          1
        2 -     3 ████        2
        4 -     7             0
        8 -    15 ██          1
    """
    places = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(places)
    rows = []
    for place in range(int(places.min()), len(counts)):
        bar = "█" * round(width * counts[place] / counts.max())
        rows.append(f"{1 << place:5} - {(2 << place) - 1:5} {bar:{width}} {counts[place]:8,}")
    return "\n".join(rows)


def budgets(lengths: np.ndarray, budget: int, overflow: Any) -> str:
    """Tell how full packs get, and how many samples do not fit whole, by budget."""
    rows = ["   budget     packs     fill  samples/pack  longer than a pack"]
    for each in (budget // 4, budget // 2, budget, budget * 2):
        long = int((lengths > each).sum())
        if each < 1 or (overflow == "error" and long):
            continue
        plan = pack_lengths(lengths, each, overflow=overflow)
        packed, mark = int(plan.lengths.sum()), "*" if each == budget else " "
        fill, per_pack = "-", "-"
        if len(plan):
            fill = f"{packed / (len(plan) * each):.2%}"
            per_pack = f"{len(plan.lengths) / len(plan):.1f}"
        rows.append(f"{mark}{each:8,} {len(plan):9,} {fill:>8} {per_pack:>13} {long:19,}")
    return "\n".join(rows)


def padding_waste(lengths: np.ndarray, batch: int = 32) -> float:
    """Share of a padded batch that is padding, batches drawn in random order.

    >>> padding_waste(np.array([1, 2]), batch=2)
    0.25
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(lengths), batch)
    longest = np.maximum.reduceat(lengths[order], starts)
    rows = np.diff(np.append(starts, len(lengths)))
    return float(1 - lengths.sum() / (longest * rows).sum())


def decoded(pack: Pack, tokenizer: Any) -> str:
    """Show a pack's samples, [[what counts]] in brackets."""
    lines = [f"pack {pack.index}: {len(pack.tokens)} tokens, {pack.num_label_tokens} count"]
    for a, b in islice(pairwise(pack.cu_seqlens.tolist()), MOST_SAMPLES):
        counts = pack.labels[a:b] != IGNORE_INDEX
        edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), int(b - a)]
        text = ""
        for start, end in pairwise(edges):
            part = _shown(pack.tokens[a + start : a + end], tokenizer)
            text += f"[[{part}]]" if counts[start] else part
        lines.append(f"  {b - a:5} tokens  {text}")
    more = len(pack.cu_seqlens) - 1 - MOST_SAMPLES
    return "\n".join([*lines, f"  ... and {more} samples more"] if more > 0 else lines)


def _shown(ids: np.ndarray, tokenizer: Any, most: int = 160) -> str:
    text = " ".join(map(str, ids.tolist())) if tokenizer is None else tokenizer.decode(ids)
    text = text.replace("\n", "\\n")
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
