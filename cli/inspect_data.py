"""`nopad inspect DATA`: show what packing does to a dataset, without training.

    nopad inspect corpus.jsonl --tokenizer path/or/name --budget 8192
    nopad inspect tokens/ --budget 4096 --html report.html

Shows the lengths of the samples, the fill of packs for several budgets, the waste of padding, a map
of the first packs, and the first pack as text, in which tokens that count for the loss are coloured
(or [[in brackets]] without colour). --html writes all of it as one page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from .load_pretrained import add_chat_template_option, load_tokenizer, set_chat_template
from .options import (
    add_data_options,
    add_length_options,
    as_cli_message,
    count,
    data_kwargs,
    length_kwargs,
    parser,
    png_path,
    writable_path,
)
from .terminal import console, has_color, printable, progress, table

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from ..packing import Pack
    from ..packing.encoding import SkippedRows
    from .data_report import BudgetRow, DataReport, Span

EMPTY = "the data is empty"
MAX_LENGTHS = 1 << 24
"""Samples to inspect at most, if their lengths are known."""
MAX_STREAM_PACKS = 256
"""Packs of tokens to read of a stream, to measure its first samples."""
TERMINAL_CHARS, PAGE_CHARS = 160, 1200
"""Characters to show of a span of text."""
BAR_WIDTH = 40
MAX_WIDTH = 100
"""Columns of the map of packs, also in a pipe."""


def main(argv: list[str]) -> int:
    """Inspect a dataset; return the exit status."""
    args = _parse_args(argv)
    if not args.data:
        raise ValueError("the name of the data is empty: pass a file or a folder")
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    if args.chat_template is not None:
        if tokenizer is None:
            raise ValueError("--chat-template needs --tokenizer")
        set_chat_template(tokenizer, args.chat_template)
    try:
        return _inspect(args, tokenizer)
    except ValueError as error:
        message = as_cli_message(error)
        message = message.replace("set its chat_template", "pass --chat-template FILE")
        raise ValueError(message) from error


def _inspect(args: argparse.Namespace, tokenizer: Any) -> int:
    with progress("tokenizing") as advance:
        data = _open(args, tokenizer, advance)
        lengths, total = measure_lengths(data, data.skipped, advance)
        packs = list(islice(data, max(args.packs, args.decode))) if len(lengths) else []
    skipped = data.skipped
    reason = printable(as_cli_message(skipped.reasons[0])) if skipped.rows else ""
    if not len(lengths):
        raise ValueError(f"every row was skipped; the first: {reason}" if reason else EMPTY)
    notes = _corpus_notes(args, data)
    notes += [f"{skipped.rows:,} rows skipped; the first: {reason}"] if reason else []
    report = _report(args, tokenizer, lengths, total, notes, packs)
    from .data_report import write_html, write_png

    if args.html:
        write_html(args.html, report)
    if args.png:
        write_png(args.png, report.packs, args.budget)
    _print(report)  # last: its reader may close the pipe
    for pack in packs[: args.decode]:
        _print_pack(pack, tokenizer)
    for name, path in (("report", args.html), ("map", args.png)):
        if path:
            console().print(f"\n{name}: {printable(path)}", soft_wrap=True)
    return 0


def _corpus_notes(args: argparse.Namespace, data: Any) -> list[str]:
    """Describe a folder of tokens; with --verify, compare its files with their checksums."""
    from ..packing.sources import find_damage, open_folder

    manifest = None if data.lengths is None else data.reader.store.arrays[0].manifest
    if manifest is None and args.verify:
        raise ValueError(f"--verify: {args.data} is not a folder that `nopad tokenize` wrote")
    if manifest is None:
        return []
    shards, encoded = len(manifest["shards"]), manifest["encoded"]
    notes = [
        f"{manifest['tokens']:,} tokens of {printable(manifest['source'])} in {shards:,} shards "
        f"of {manifest['dtype']}, vocabulary {manifest['vocab_size']}, eos {encoded['add_eos']}, "
        f"tokenizer {manifest['tokenizer']}"
    ]
    if args.verify:
        folder = open_folder(args.data)
        size = sum(n for shard in manifest["shards"] for n, _ in shard["files"].values())
        with progress("verifying", size) as advance:
            damaged = find_damage(folder, advance)
        if damaged is not None:
            raise ValueError(
                f"{args.data}: {damaged} differs from its checksum: delete it, and run the same "
                "`nopad tokenize` again, which replaces it"
            )
        notes.append("all files match their checksums")
    return notes


def _open(args: argparse.Namespace, tokenizer: Any, advance: Any) -> Any:
    """Return the packs of the data; a small source is tokenized here."""
    from ..packing import PackedDataset
    from .counted_rows import open_counted

    options = data_kwargs(args)
    source = open_counted(args.data, tokenizer, options, advance)
    return PackedDataset(
        source,
        tokenizer=tokenizer,
        seed=args.seed,
        rank=0,
        world_size=1,
        **length_kwargs(args),
        **options,
    )


def _parse_args(argv: list[str]) -> argparse.Namespace:
    command = parser("inspect", "DATA [options]", __doc__)
    add = command.add_argument
    what = "jsonl, parquet, text or token files, a saved `datasets` folder or a hub name"
    add("data", metavar="DATA", help=what)
    add("--tokenizer", help="folder or hub name; not needed for token ids")
    add_chat_template_option(add)
    add_data_options(add)
    add_length_options(add, budget=8192, overflow="split")
    add("--seed", type=int, default=0, help="seed of the order")
    add("--packs", type=count, default=12, help="packs on the map")
    add("--decode", type=count, default=1, help="packs to show as text")
    add("--verify", action="store_true",
        help="compare a folder of tokens with its checksums")  # fmt: skip
    add("--html", type=writable_path, help="also write a report to this HTML file")
    add("--png", type=png_path, help="also write the map to this PNG file (needs matplotlib)")
    return command.parse_args(argv)


def measure_lengths(
    data: Any, skipped: SkippedRows, advance: Callable[[int], None] = lambda done: None
) -> tuple[np.ndarray, int | None]:
    """Return the lengths of the first samples, and the number of samples; None if unknown.

    skipped: counts the rows of a stream that cannot be used.
    """
    import numpy as np

    from ..packing.encoding import ENCODE_BATCH, encode_rows, raise_or_skip

    if data.lengths is not None:
        return np.asarray(data.lengths[:MAX_LENGTHS], np.int64), len(data.lengths)
    stream, lengths, tokens = data.stream_settings, [], 0
    rows, counted = stream.sources[0].read(0, 1), skipped if stream.skips_errors else None
    max_tokens = MAX_STREAM_PACKS * stream.budget
    while tokens < max_tokens and (batch := list(islice(rows, ENCODE_BATCH))):
        samples = raise_or_skip(encode_rows(batch, stream.encoder), counted)
        more = [len(sample) for sample in samples]
        lengths, tokens = lengths + more, tokens + sum(more)
    is_all = next(rows, None) is None
    return np.array(lengths, np.int64), len(lengths) if is_all else None


def _report(
    args: argparse.Namespace,
    tokenizer: Any,
    lengths: np.ndarray,
    total: int | None,
    notes: list[str],
    packs: list[Pack],
) -> DataReport:
    from .data_report import DataReport, budget_rows, labelled_samples, length_bins

    texts = []
    for pack in packs[: args.decode] if args.html else ():
        samples = labelled_samples(pack, tokenizer, PAGE_CHARS)
        clean = [(n, [span._replace(text=printable(span.text)) for span in s]) for n, s in samples]
        texts.append((_pack_title(pack), clean))
    return DataReport(
        name=printable(args.data),
        summary=_summary(lengths, total),
        notes=notes,
        num_samples=len(lengths),
        num_tokens=int(lengths.sum()),
        bins=length_bins(lengths),
        rows=budget_rows(lengths, **length_kwargs(args)),
        budget=args.budget,
        too_long=_too_long(args.max_length, args.overflow),
        packs=[pack.lengths for pack in packs[: args.packs]],
        texts=texts,
    )


def _summary(lengths: np.ndarray, total: int | None) -> str:
    import numpy as np

    median, p99 = np.percentile(lengths, [50, 99]).astype(int).tolist()
    first = "" if total == len(lengths) else "the first "
    of = f" of {total:,}" if first and total is not None else ""
    return (
        f"{first}{len(lengths):,}{of} samples, {lengths.sum():,} tokens; "
        f"length: median {median}, p99 {p99}, max {lengths.max()}"
    )


def _too_long(max_length: int | None, overflow: str) -> str:
    limit = "" if max_length is None else f"{max_length:,} tokens (--max-length) or "
    then = {"split": "split", "truncate": "truncated", "drop": "dropped", "error": "refused"}
    return f"samples longer than {limit}the budget; they are {then[overflow]} (--overflow)"


def _print(report: DataReport) -> None:
    """Print the report, without the text of packs."""
    from rich.text import Text

    from .data_report import draw_packs

    out = console()
    out.print(report.summary, style="bold")
    for note in report.notes:
        out.print(note, style="yellow")
    lengths = table("length", "", "samples", right=("length", "samples"))
    most = max(each.samples for each in report.bins)
    for low, high, samples in report.bins:
        bar = "█" * round(BAR_WIDTH * samples / most)
        lengths.add_row(f"{low:,} - {high:,}", Text(bar, "cyan"), f"{samples:,}")
    out.print("")
    out.print(lengths)
    out.print("")
    out.print(_budget_table(report.rows, report.budget))
    out.print("")
    out.print("fill: share of the positions that hold tokens, in packs and in padded batches")
    out.print(f"too long: {report.too_long}")
    chosen = next((row for row in report.rows if row.budget == report.budget), None)
    if chosen is not None:
        out.print(
            f"padded batches of {report.budget:,} positions would be {1 - chosen.padded:.1%} "
            f"padding and take {chosen.step_ratio:.1f} times the steps"
        )
    if report.packs:
        out.print(
            f"\nthe first packs of {report.budget:,} tokens: a block is a sample, blank is unused",
            style="bold",
        )
        width = max(20, min(out.width, MAX_WIDTH) - 32)
        out.print(draw_packs(report.packs, report.budget, width), no_wrap=True)


def _budget_table(rows: Sequence[BudgetRow], budget: int) -> Any:
    """Return a table of packs, fill and too long samples for several budgets."""
    names = ("budget", "packs", "fill", "samples/pack", "too long", "padded fill")
    made = table(*names, right=names)
    for row in rows:
        cells = [
            f"{row.budget:,}",
            f"{row.packs:,}",
            "-" if row.fill is None else f"{row.fill:.2%}",
            "-" if row.samples_per_pack is None else f"{row.samples_per_pack:.1f}",
            f"{row.num_long:,}",
            f"{row.padded:.2%}",
        ]
        made.add_row(*cells, style="bold cyan" if row.budget == budget else None)
    return made


def _pack_title(pack: Pack) -> str:
    return f"pack {pack.index}: {len(pack.tokens)} tokens, {pack.num_label_tokens} in the loss"


def _print_pack(pack: Pack, tokenizer: Any) -> None:
    """Print a pack's samples as text; tokens in the loss are green, or [[in brackets]]."""
    from rich.text import Text

    from .data_report import labelled_samples

    out = console()
    mark = "green" if has_color(out) else "[[in brackets]]"
    out.print(f"\n{_pack_title(pack)} ({mark})", style="bold")
    samples = labelled_samples(pack, tokenizer, TERMINAL_CHARS)
    for length, spans in samples:
        line = Text(f"  {length:5} tokens  ")
        for span in spans:
            line.append_text(_span_text(span, has_color(out)))
        out.print(line)
    rest = len(pack.cu_seqlens) - 1 - len(samples)
    if rest > 0:
        out.print(f"  ... and {rest} more samples", style="dim")


def _span_text(span: Span, color: bool) -> Text:
    from rich.text import Text

    text = printable(span.text.replace("\n", "\\n"))
    if color:
        return Text(text, "green" if span.in_loss else "dim")
    return Text(f"[[{text}]]" if span.in_loss else text)
