"""`nopad inspect DATA`: show what packing does to a dataset, without training.

    nopad inspect corpus.jsonl --tokenizer path/or/name --budget 8192
    nopad inspect tokens/ --budget 4096 --html report.html
    nopad inspect web.jsonl=0.7 code.jsonl=0.3 --tokenizer path/or/name

Shows the lengths of the samples, the share of tokens in the loss and of every role, samples without
labels and duplicates, the fill of packs for several budgets, the waste of padding, a map of the
first packs, and the first pack as text, in which tokens that count for the loss are coloured (or
[[in brackets]] without colour). --html writes all of it as one page, --json the figures and the
skipped rows. Samples of rows are named by file and line, ready tokens by their number from 0.
Exit status: 0 if the data was inspected, also if --on-error skip skipped rows (see --json); 2 if it
cannot be read or, without that option, has a row that cannot be used.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
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
    positive,
    writable_path,
)
from .terminal import console, has_color, printable, progress, table

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from ..packing import Pack
    from ..packing.encoding import SkippedRows
    from ..packing.sources import RowError
    from .data_report import BudgetRow, Composition, DataReport, RowSamples, Span

EMPTY = "the data is empty"
MAX_LENGTHS = 1 << 24
"""Samples to inspect at most, if their lengths are known."""
MAX_STREAM_PACKS = 256
"""Packs of tokens to examine of large data, unless --samples says how many samples."""
TERMINAL_CHARS, PAGE_CHARS = 160, 1200
"""Characters to show of a span of text."""
FATES = {"split": "split", "truncate": "truncated", "drop": "dropped", "error": "refused"}
"""What `--overflow` does to samples that are too long."""
BAR_WIDTH = 40
MAX_WIDTH = 100
"""Columns of the map of packs, also in a pipe."""


def main(argv: list[str]) -> int:
    """Inspect a dataset; return the exit status."""
    args = _parse_args(argv)
    args.sources = weighted_sources(args.data)
    args.data = args.sources[0][0] if len(args.sources) == 1 else None
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
    import numpy as np

    from .data_report import (
        EXTREMES,
        MAX_LOCATIONS,
        Composition,
        RowSamples,
        role_line,
        sample_figures,
        sample_lines,
        write_html,
        write_json,
    )

    composition, rows = Composition(), RowSamples()
    with progress("tokenizing") as advance:
        data, sources = _open(args, tokenizer, advance)
        if data.lengths is None:
            by_source, total = stream_lengths(data, composition, rows, args.samples)
        else:
            by_source, total = stored_lengths(data, sources, composition, rows, args.samples)
        lengths = np.concatenate(by_source)
        packs = list(islice(data, max(args.packs, args.decode))) if len(lengths) else []
    skipped = data.skipped
    reason = printable(as_cli_message(skipped.reasons[0])) if skipped.rows else ""
    if not len(lengths):
        raise ValueError(f"every row was skipped; the first: {reason}" if reason else EMPTY)
    notes = _corpus_notes(args, data)
    notes += [f"{skipped.rows:,} rows skipped; the first: {reason}"] if reason else []
    limit, fate = args.max_length or args.budget, FATES[args.overflow]
    max_locations = EXTREMES if args.json is None else MAX_LOCATIONS
    empty = [sample for sample in rows.empty_answers if sample < composition.samples]
    figures = sample_figures(composition, empty, lengths, limit, rows.locate, max_locations)
    roles = _roles(data.encoder.tokenizer, rows, lengths)
    facts = [printable(line) for line in sample_lines(figures, total, fate)]
    facts += [role_line(roles)] if roles else []
    facts += _source_lines(args.sources, data, by_source)
    report = _report(args, tokenizer, lengths, total, (notes, facts), packs)
    if args.json:
        counts = {"all_samples": total, "length": _length_figures(lengths)}
        last = {"tokens_by_role": roles, "skipped": _skipped(skipped, rows.errors)}
        write_json(args.json, report, {**counts, **figures, **last})
    if args.html:
        write_html(args.html, report)
    _print(report)  # last: its reader may close the pipe
    for pack in packs[: args.decode]:
        _print_pack(pack, tokenizer)
    if args.html or args.json:
        names = ", ".join(printable(path) for path in (args.html, args.json) if path)
        console().print(f"\nreport: {names}", soft_wrap=True)
    return 0


def _skipped(skipped: SkippedRows, errors: list[RowError]) -> dict[str, Any]:
    """Return the skipped rows: all if they are of rows, the first if of ready tokens."""
    pairs = [(str(error.location), error.reason) for error in errors]
    pairs = pairs or [tuple(reason.split(": ", 1)) for reason in skipped.reasons]
    rows = [{"location": location, "reason": as_cli_message(why)} for location, why in pairs]
    return {"count": skipped.rows, "rows": rows}


def _corpus_notes(args: argparse.Namespace, data: Any) -> list[str]:
    """Describe a folder of tokens; with --verify, compare its files with their checksums."""
    from ..packing.sources import find_damage, open_folder

    name: str = args.data or "a mixture"
    is_stored = data.lengths is not None and args.data is not None
    manifest = data.reader.store.arrays[0].manifest if is_stored else None
    if manifest is None and args.verify:
        raise ValueError(f"--verify: {name} is not a folder that `nopad tokenize` wrote")
    if manifest is None:
        return []
    shards, encoded = len(manifest["shards"]), manifest["encoded"]
    notes = [
        f"{manifest['tokens']:,} tokens of {printable(manifest['source'])} in {shards:,} shards "
        f"of {manifest['dtype']}, vocabulary {manifest['vocab_size']}, eos {encoded['add_eos']}, "
        f"tokenizer {manifest['tokenizer']}"
    ]
    if args.verify:
        folder = open_folder(name)
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


def weighted_sources(names: list[str]) -> list[tuple[str, float | None]]:
    """Split the weights from the names of a mixture; one source has none.

    >>> weighted_sources(["a.jsonl=0.7", "b.jsonl=0.3"]), weighted_sources(["lang=en"])
    ([('a.jsonl', 0.7), ('b.jsonl', 0.3)], [('lang=en', None)])
    """
    pairs = [_weighted(name) for name in names]
    if not all(name for name, _ in pairs):
        raise ValueError("the name of the data is empty: pass a file or a folder")
    if len(pairs) > 1 and any(weight is None for _, weight in pairs):
        raise ValueError("several sources need weights: a.jsonl=0.7 b.jsonl=0.3")
    if len(pairs) == 1 and pairs[0][1] is not None:
        raise ValueError(f"{names[0]}: one source needs no weight; pass {pairs[0][0]}")
    return pairs


def _weighted(text: str) -> tuple[str, float | None]:
    name, _, number = text.rpartition("=")
    try:
        is_path = not name or Path(text).expanduser().exists()
        return (text, None) if is_path else (name, float(number))
    except (ValueError, OSError):
        return text, None


def _open(args: argparse.Namespace, tokenizer: Any, advance: Any) -> tuple[Any, list[Any]]:
    """Return the packs of the data, and its sources; a small source is tokenized here."""
    from ..packing import PackedDataset
    from .counted_rows import open_counted

    options = data_kwargs(args)
    sources = [open_counted(name, tokenizer, options, advance) for name, _ in args.sources]
    weights = [weight for _, weight in args.sources]
    data = PackedDataset(
        sources[0] if len(sources) == 1 else list(zip(sources, weights, strict=True)),
        tokenizer=tokenizer,
        seed=args.seed,
        rank=0,
        world_size=1,
        **length_kwargs(args),
        **options,
    )
    return data, sources


def _parse_args(argv: list[str]) -> argparse.Namespace:
    command = parser("inspect", "DATA [options]", __doc__)
    add = command.add_argument
    what = "jsonl, parquet, text or token files, a saved `datasets` folder or a hub name"
    add("data", metavar="DATA", nargs="+", help=f"{what}; several with weights: DATA=0.7 DATA=0.3")
    add("--tokenizer", help="folder or hub name; not needed for token ids")
    add_chat_template_option(add)
    add_data_options(add)
    add_length_options(add, budget=8192, overflow="split")
    add("--seed", type=int, default=0, help="seed of the order")
    add("--samples", type=positive,
        help="samples to examine for labels and duplicates, of a source that is streamed also for "
        "lengths; default: all of small data, the first of large data")  # fmt: skip
    add("--packs", type=count, default=12, help="packs on the map")
    add("--decode", type=count, default=1, help="packs to show as text")
    add("--verify", action="store_true",
        help="compare a folder of tokens with its checksums")  # fmt: skip
    add("--html", type=writable_path, help="also write a report to this HTML file")
    add("--json", type=writable_path,
        help="also write the figures and the skipped rows to this JSON file")  # fmt: skip
    return command.parse_args(argv)


def stored_lengths(
    data: Any,
    sources: list[Any],
    composition: Composition,
    rows: RowSamples,
    max_samples: int | None,
) -> tuple[list[np.ndarray], int]:
    """Return the lengths of each source's samples, whose tokens are stored, and their number.

    max_samples: samples to examine; None: all that were encoded here, the first ready ones.
    """
    import numpy as np

    from ..packing.sources import RowSource

    store = data.reader.store
    was_read = all(isinstance(source, RowSource) for source in sources)
    max_tokens = math.inf
    if max_samples is None and not was_read:
        max_tokens = MAX_STREAM_PACKS * data.settings["budget"]
    for document in range(min(len(store), max_samples or len(store))):
        if composition.tokens >= max_tokens:
            break
        array, where = store.locate(document)
        composition.add(np.asarray(array.flat[where]), array.labels_of(where))
    lengths = np.asarray(data.lengths[:MAX_LENGTHS], np.int64)
    bounds = store.source_bounds(max(array.source for array in store.arrays) + 1)
    for number, source in enumerate(sources):
        rows.count = int(bounds[number])
        if not isinstance(source, RowSource):
            continue
        if data.skipped.rows:  # encoded again: a store does not tell which rows it lacks
            deque(rows.encode(source.source.read(0, 1), data.encoder), maxlen=0)
        else:
            rows.add_all(source.source.read(0, 1), data.encoder)
    return np.split(lengths, bounds[1:-1]), len(data.lengths)


def stream_lengths(
    data: Any, composition: Composition, rows: RowSamples, max_samples: int | None
) -> tuple[list[np.ndarray], int | None]:
    """Return the lengths of each stream's first samples, and the samples; None if unknown.

    max_samples: samples to examine of each source.
    """
    import numpy as np

    from ..packing.encoding import raise_or_skip

    stream = data.stream_settings
    skipped = data.skipped if stream.skips_errors else None
    max_tokens = math.inf
    if max_samples is None:
        max_tokens = MAX_STREAM_PACKS * stream.budget // len(stream.sources)
    lengths, is_all = [], True
    for source in stream.sources:
        read, tokens = [], 0
        samples = raise_or_skip(rows.encode(source.read(0, 1), stream.encoder), skipped)
        for sample in islice(samples, max_samples):
            composition.add(sample.tokens, sample.labels)
            read.append(len(sample))
            tokens += len(sample)
            if tokens >= max_tokens:
                break
        lengths.append(np.array(read, np.int64))
        is_all &= next(samples, None) is None
    return lengths, sum(map(len, lengths)) if is_all else None


def _roles(tokenizer: Any, rows: RowSamples, lengths: np.ndarray) -> dict[str, Any]:
    """Return the shares of the tokens of the first chats by role."""
    from .data_report import role_figures

    if not hasattr(tokenizer, "apply_chat_template"):
        return {}
    chats = [(messages, int(lengths[i])) for messages, i in rows.chats if i < len(lengths)]
    return role_figures(chats, lambda text: tokenizer.encode(text, add_special_tokens=False))


def _source_lines(
    sources: list[tuple[str, float | None]], data: Any, lengths: list[np.ndarray]
) -> list[str]:
    """Describe the sources of a mixture."""
    if len(sources) == 1:
        return []
    weights = [weight or 0.0 for _, weight in sources]
    sizes = [int(each.sum()) for each in lengths]
    laps = data.report().get("laps") if data.lengths is not None else None
    lines = []
    for i, (name, weight) in enumerate(sources):
        read = "" if laps is None else f", read {laps[i]:.2f} times per epoch"
        lines.append(
            f"source {printable(name)}: weight {weight:g}, {weights[i] / sum(weights):.1%} of the "
            f"packs; {len(lengths[i]):,} samples, {sizes[i] / max(1, sum(sizes)):.1%} of the "
            f"data{read}"
        )
    return lines


def _report(
    args: argparse.Namespace,
    tokenizer: Any,
    lengths: np.ndarray,
    total: int | None,
    lines: tuple[list[str], list[str]],
    packs: list[Pack],
) -> DataReport:
    """Return the report. lines: its notes and facts."""
    from .data_report import DataReport, budget_rows, labelled_samples, length_bins

    texts = []
    for pack in packs[: args.decode] if args.html else ():
        samples = labelled_samples(pack, tokenizer, PAGE_CHARS)
        clean = [(n, [span._replace(text=printable(span.text)) for span in s]) for n, s in samples]
        texts.append((_pack_title(pack), clean))
    return DataReport(
        name=printable(" + ".join(name for name, _ in args.sources)),
        summary=_summary(lengths, total),
        notes=lines[0],
        facts=lines[1],
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
    length = ", ".join(f"{name} {value}" for name, value in _length_figures(lengths).items())
    first = "" if total == len(lengths) else "the first "
    of = f" of {total:,}" if first and total is not None else ""
    return f"{first}{len(lengths):,}{of} samples, {lengths.sum():,} tokens; length: {length}"


def _length_figures(lengths: np.ndarray) -> dict[str, int]:
    import numpy as np

    median, p99 = np.percentile(lengths, [50, 99]).astype(int).tolist()
    return {"median": median, "p99": p99, "max": int(lengths.max())}


def _too_long(max_length: int | None, overflow: str) -> str:
    limit = "" if max_length is None else f"{max_length:,} tokens (--max-length) or "
    return f"samples longer than {limit}the budget; they are {FATES[overflow]} (--overflow)"


def _print(report: DataReport) -> None:
    """Print the report, without the text of packs."""
    from rich.text import Text

    from .data_report import draw_packs

    out = console()
    out.print(report.summary, style="bold")
    for note in report.notes:
        out.print(note, style="yellow")
    for fact in report.facts:
        out.print(fact)
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
