"""`nopad inspect --html`: write a `DataReport` as one page without scripts, with all data escaped.

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
from .labelled_text import Span

NUM_COLORS = 5
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class DataReport:
    """What the page shows."""

    name: str
    summary: str
    notes: Sequence[str]
    facts: Sequence[str]
    """Loss tokens, duplicates, extreme lengths, roles and sources, in lines."""
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
        *(f"<p>{escape(line)}</p>" for line in (*report.notes, *report.facts)),
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
            "sample; blank space is unused.",
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


STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #fff; --ink: #1f2328; --soft: #59636e;
  --rule: #d1d9e0; --track: #eaeef2; --blue: #0969da; --orange: #bc4c00; --in: #dafbe1;
  --in-ink: #116329; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #151b23; --ink: #f0f6fc;
  --soft: #9198a1; --rule: #30363d; --track: #262c36; --blue: #4493f8; --orange: #f0883e;
  --in: #12361f; --in-ink: #7ee787; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0; color: var(--soft); max-width: 75ch; overflow-wrap: anywhere; }
header p { margin-top: 6px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 22px 24px 24px; margin-top: 20px; }
section > p { margin-bottom: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 24px; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 14px 16px; }
.cards b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 13px; }
.good b { color: var(--blue); } .bad b { color: var(--orange); }
.bins { display: flex; align-items: flex-end; gap: 6px; height: 190px; }
.bins div { flex: 1; display: flex; flex-direction: column; justify-content: flex-end;
  height: 100%; text-align: center; font-size: 12px; color: var(--soft); min-width: 0;
  font-variant-numeric: tabular-nums; }
.bins i { background: var(--blue); border-radius: 4px 4px 0 0; min-height: 1px; }
.bins small { border-top: 1px solid var(--rule); padding-top: 4px; font-size: 12px;
  white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 500; color: var(--soft); font-size: 13px; }
th, td { padding: 8px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td { text-align: right; } .wide { text-align: left; width: 44%; min-width: 260px; }
.chosen td { font-weight: 650; }
.bar { display: flex; align-items: center; gap: 10px; margin: 3px 0; font-size: 13px; }
.bar span { flex: 1; height: 12px; background: var(--track); border-radius: 3px;
  overflow: hidden; } .bar i { display: block; height: 100%; background: var(--blue); }
.bar em { font-style: normal; width: 108px; font-weight: 400; }
.padded i { background: var(--orange); }
.map { display: grid; grid-template-columns: auto 1fr auto; gap: 4px 12px; align-items: center;
  font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.map span { display: flex; height: 18px; background: var(--track); border-radius: 3px;
  overflow: hidden; } .map i { flex: none;
  box-shadow: inset -1px 0 var(--card); }
.c0 { background: #3b7dd8; } .c1 { background: #2a9d8f; } .c2 { background: #7c6bc4; }
.c3 { background: #63b3dd; } .c4 { background: #5c6f91; }
h3 { font-size: 14px; margin: 20px 0 8px; font-weight: 600; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr));
  gap: 10px; align-items: start; }
pre { margin: 0; padding: 10px 12px; background: var(--page); border: 1px solid var(--rule);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--soft);
  font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre > small { float: right; margin-left: 12px; font: 12px system-ui, sans-serif;
  color: var(--soft); }
mark { background: var(--in); color: var(--in-ink); border-radius: 3px; padding: 1px 0;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
pre span, mark { unicode-bidi: isolate; }
.legend mark { padding: 1px 6px; }
footer { margin-top: 24px; color: var(--soft); font-size: 13px; }
"""
