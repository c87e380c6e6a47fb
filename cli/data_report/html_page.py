"""`nopad inspect --html`: one page without scripts or other files, safe to open with any data.

Everything that comes from the data is escaped, and a content security policy forbids scripts and
requests, so that text in a dataset cannot become code in a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from .figures import Bin, BudgetRow
from .html_style import STYLE
from .labelled_text import Span

NUM_COLORS = 5
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class DataReport:
    """What the page shows."""

    name: str
    summary: str
    notes: Sequence[str]
    num_samples: int
    num_tokens: int
    bins: Sequence[Bin]
    rows: Sequence[BudgetRow]
    budget: int
    too_long: str
    """Which samples are too long, and what happens to them."""
    packs: Sequence[np.ndarray]
    """The lengths of the samples of the first packs."""
    texts: Sequence[tuple[str, Sequence[tuple[int, Sequence[Span]]]]]
    """A heading for each pack, and the length and spans of its samples."""


def write_html(path: Path, report: DataReport) -> None:
    """Write the page."""
    path.write_text(page(report), encoding="utf-8")


def page(report: DataReport) -> str:
    """Return the page as HTML."""
    chosen = next((row for row in report.rows if row.budget == report.budget), None)
    parts = [
        f"<header><h1>{escape(report.name)}</h1><p>{escape(report.summary)}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        "</header>",
        _cards(report, chosen),
        _section("Sample lengths", "Samples by their number of tokens.", _bins(report.bins)),
        _section(
            "Fill by budget",
            "How much of a pack holds tokens, and how much of a batch of the same size would, if "
            "each sample were padded to the longest of its batch. "
            f"Too long are {escape(report.too_long)}.",
            _budgets(report.rows, report.budget),
        ),
        _section(
            "Pack map",
            f"The first packs of {report.budget:,} tokens, in training order. Each block is a "
            "sample; what is left blank is not filled.",
            _map(report.packs, report.budget),
        ),
        *([_texts(report.texts)] if report.texts else []),
        "<footer>Made by nopad inspect.</footer>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)}: packing report</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>\n{content}</section>"


def _cards(report: DataReport, row: BudgetRow | None) -> str:
    cards = [("", f"{report.num_samples:,}", "samples"), ("", f"{report.num_tokens:,}", "tokens")]
    if row is not None and row.fill is not None:
        cards += [
            ("good", f"{row.fill:.1%}", f"fill of packs of {row.budget:,}"),
            ("good", f"{row.samples_per_pack:.1f}", "samples per pack"),
            ("bad", f"{1 - row.padded:.1%}", "of a padded batch is padding"),
            ("bad", f"{row.step_ratio:.1f}×", "the steps with padding"),
        ]
    made = (
        f'<div class="{kind}"><b>{big}</b><span>{text}</span></div>' for kind, big, text in cards
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _bins(bins: Sequence[Bin]) -> str:
    most = max(each.samples for each in bins)
    bars = (
        f'<div>{each.samples:,}<i style="height:{75 * each.samples / most:.1f}%"></i>'
        f"<small>{_range(each)}</small></div>"
        for each in bins
    )
    return f'<div class="scroll"><div class="bins">{"".join(bars)}</div></div>'


def _range(each: Bin) -> str:
    """Return the lengths of a bar, short: 1k is 1,024."""
    low = f"{each.low >> 10}k" if each.low >= 1024 else str(each.low)
    high = f"{(each.high + 1) >> 10}k" if each.low >= 1024 else str(each.high)
    return low if each.low == each.high else f"{low}–{high}"


def _budgets(rows: Sequence[BudgetRow], budget: int) -> str:
    names = ("packs", "samples per pack", "too long")
    columns = "".join(f"<th>{name}</th>" for name in names)
    head = f'<tr><th>budget</th><th class="wide">fill</th>{columns}</tr>'
    lines = []
    for row in rows:
        fill = 0.0 if row.fill is None else row.fill
        per_pack = "–" if row.samples_per_pack is None else f"{row.samples_per_pack:.1f}"
        bars = _bar("packed", "", fill) + _bar("padded", "padded", row.padded)
        chosen = ' class="chosen"' if row.budget == budget else ""
        lines.append(
            f'<tr{chosen}><td>{row.budget:,}</td><td class="wide">{bars}</td>'
            f"<td>{row.packs:,}</td><td>{per_pack}</td><td>{row.num_long:,}</td></tr>"
        )
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _bar(label: str, kind: str, share: float) -> str:
    bar = f'<span><i style="width:{100 * share:.1f}%"></i></span>'
    return f'<div class="bar {kind}">{bar}<em>{share:.1%} {label}</em></div>'


def _map(packs: Sequence[np.ndarray], budget: int) -> str:
    rows = []
    for index, lengths in enumerate(packs):
        blocks = "".join(
            f'<i class="c{i % NUM_COLORS}" style="width:{100 * n / budget:.3f}%" '
            f'title="{n:,} tokens"></i>'
            for i, n in enumerate(np.asarray(lengths).tolist())
        )
        fill = f"{np.sum(lengths) / budget:.1%}, {len(lengths)} samples"
        rows.append(f"<b>{index}</b><span>{blocks}</span><small>{fill}</small>")
    return f'<div class="map">{"".join(rows)}</div>'


def _texts(packs: Sequence[tuple[str, Sequence[tuple[int, Sequence[Span]]]]]) -> str:
    parts = [
        "<section><h2>What counts for the loss</h2>"
        '<p class="legend"><mark>Marked text</mark> is predicted and counts for the loss; other '
        "text is only read. The first token of a sample never counts.</p>"
    ]
    for heading, samples in packs:
        parts.append(f'<h3>{escape(heading)}</h3><div class="samples">')
        for length, spans in samples:
            text = "".join(_span(span) for span in spans)
            parts.append(f"<pre><small>{length:,} tokens</small>{text}</pre>")
        parts.append("</div>")
    return "".join([*parts, "</section>"])


def _span(span: Span) -> str:
    name = "mark" if span.in_loss else "span"
    return f"<{name}>{escape(span.text)}</{name}>"
