"""Summarize a run from its logs: five lines, and a plot in the run folder.

The logs include the steps before a resume, so the summary covers the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from nopad.packing.planning import padded_fill
from nopad.recipes.support.run_dir import EVAL_LOG, RunDir

METRICS = ("parses", "matched")
WIDTH, HEIGHT, LEFT, RIGHT, GAP, MAX_POINTS = 720, 110, 64, 696, 48, 200
"""Of the plot, in pixels; and the points of a line, each the mean of a few steps."""


class Panel(NamedTuple):
    """One quantity over the steps, from 0 to `high`, perhaps with a level to compare with."""

    name: str
    points: Sequence[tuple[float, float]]
    high: float = 1.0
    format: str = ".0%"
    level: float | None = None


def expected_padded_fill(dataset: Any, args: Any) -> float:
    """Return the fill of padded batches of the budget's size; a stream is measured on 16 packs."""
    lengths = dataset.lengths
    if lengths is None:
        lengths = np.concatenate([pack.lengths for pack in islice(dataset, 16)])
    return padded_fill(lengths, args.budget, args.overflow, args.max_length)


def write_summary(run: RunDir, padded: float, budget: int) -> list[str]:
    """Write `training.svg` into the run folder; return the lines of the summary.

    padded: the fill that padded batches would have.
    """
    log, evals = run.read_log(), run.read_log(EVAL_LOG)
    if not log:
        return []
    metric = next((name for name in METRICS if evals and f"eval/{name}" in evals[0]), "")
    scores = [(n["step"], n[f"eval/{metric}"]) for n in evals if f"eval/{metric}" in n]
    losses = [(n["step"], n["loss"]) for n in log if math.isfinite(n["loss"])]
    fills = [(n["step"], n["tokens"] / n["packs"] / budget) for n in log]
    panels = [
        Panel("loss", losses, math.ceil(max([1, *(loss for _, loss in losses)])), "g"),
        Panel("fill; dashed: of padded batches", fills, level=padded),
        Panel(f"evaluation: {metric}", scores),
    ]
    path = run.path / "training.svg"
    path.write_text(draw(run.path.name, [p for p in panels if p.points]), encoding="utf-8")

    tokens, samples, packs = (sum(n[name] for n in log) for name in ("tokens", "samples", "packs"))
    steps, fill, last = len(log), tokens / packs / budget, losses[-max(1, len(log) // 10) :]
    saved = round(steps * fill / padded) - steps
    score = f"; {metric} {scores[0][1]:.0%} -> {scores[-1][1]:.0%}" if scores else ""
    mean = sum(loss for _, loss in last) / max(1, len(last))
    lines = {
        "tokens trained": f"{tokens:,} of {samples:,} samples in {steps:,} steps",
        "fill": f"{fill:.1%}, {samples / packs:.1f} samples per pack",
        "steps saved": f"{saved:,} of {saved + steps:,} that padded batches would take",
        "loss": f"{log[0]['loss']:.2f} -> {mean:.2f} (mean of the last tenth)",
        "evaluations": f"{sum(n['eval/seconds'] for n in evals):.1f} s in {len(evals)}{score}",
        "plot": str(path),
    }
    return [f"{name:15} {text}" for name, text in lines.items()]


def plot_metrics(run: RunDir, log: Sequence[dict], names: Sequence[str]) -> list[str]:
    """Write metrics of a trainer's log as `training.svg`; return lines of their first and last."""
    points = {name: [(n["step"], n[name]) for n in log if name in n] for name in names}
    panels = [
        Panel(name, values, max(1, math.ceil(max(y for _, y in values))), "g")
        for name, values in points.items()
    ]
    path = run.path / "training.svg"
    path.write_text(draw(run.path.name, panels), encoding="utf-8")
    lines = {name: f"{at[0][1]:.3g} -> {at[-1][1]:.3g}" for name, at in points.items()}
    return [f"{name:24} {text}" for name, text in {**lines, "plot": str(path)}.items()]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the panels, one below the other, as a self-contained SVG document."""
    steps = max(step for panel in panels for step, _ in panel.points)
    height = 50 + len(panels) * (HEIGHT + GAP)
    parts = [_text(LEFT, 26, title, "font-size='15' font-weight='600'")]
    for number, panel in enumerate(panels):
        parts += _panel(panel, 66 + number * (HEIGHT + GAP), steps)
    parts.append(_text(RIGHT, height - 8, f"{steps:,} optimizer steps", "text-anchor='end'"))
    style = "font-family='system-ui, sans-serif' font-size='12' fill='#1f2328'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' {style}>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='#fff'/>", *parts, "</svg>\n"])


def _panel(panel: Panel, top: int, steps: float) -> list[str]:
    def y(value: float) -> float:
        return round(top + HEIGHT * (1 - value / panel.high), 1)

    parts = [_text(LEFT, top - 10, panel.name, "font-weight='600'")]
    for tick in (0, panel.high / 2, panel.high):
        parts.append(f"<path d='M{LEFT} {y(tick)}H{RIGHT}' stroke='#d8dee4'/>")
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:{panel.format}}", "text-anchor='end'"))
    if panel.level is not None:
        dashes = "stroke='#bc4c00' stroke-width='2' stroke-dasharray='5 4'"
        parts.append(f"<path d='M{LEFT} {y(panel.level)}H{RIGHT}' {dashes}/>")
    size = math.ceil(len(panel.points) / MAX_POINTS)
    groups = [panel.points[i : i + size] for i in range(0, len(panel.points), size)]
    means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
    line = " ".join(f"{LEFT + (RIGHT - LEFT) * x / steps:.1f},{y(value)}" for x, value in means)
    return [*parts, f"<polyline points='{line}' fill='none' stroke='#0969da' stroke-width='2'/>"]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f"<text x='{x}' y='{y}' {style}>{escape(text)}</text>"
