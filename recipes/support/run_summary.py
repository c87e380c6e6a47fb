"""What a run did, from its logs: five lines, and a plot in the run folder.

The logs keep what was done before a resume, so the summary is that of the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from nopad.packing.planning import padded_fill
from nopad.recipes.support.run_plot import Panel, draw

RECENT = 50
"""The most steps at the end of a run whose mean loss is told; of a short run, the last tenth."""
MEASURED_PACKS = 16
"""Packs to read of a stream, whose lengths are not known, to compare with padding."""


def expected_padded_fill(
    dataset: Any, budget: int, overflow: Any = "split", max_length: int | None = None
) -> float:
    """Return the fill that padded batches of the same size would have on this dataset."""
    lengths = dataset.lengths
    if lengths is None:
        lengths = np.concatenate([pack.lengths for pack in islice(dataset, MEASURED_PACKS)])
    return padded_fill(lengths, budget, overflow, max_length)


def padding_line(padded: float, budget: int) -> str:
    """Say, before the first step, what padding would waste.

    >>> padding_line(0.4, 2048)
    'without packing, 60.0% of a batch of 2,048 would be padding: 2.5 times the steps'
    """
    return (
        f"without packing, {1 - padded:.1%} of a batch of {budget:,} would be padding: "
        f"{1 / padded:.1f} times the steps"
    )


def summary_lines(
    log: Sequence[dict], evaluations: Sequence[dict], metric: str | None, padded: float, budget: int
) -> list[str]:
    """Return five lines: tokens trained, fill, steps saved, loss, evaluations.

    metric: the evaluations' metric to tell, if there is one.
    padded: the fill of padded batches.
    """
    steps, tokens = len(log), sum(line.get("tokens", 0) for line in log)
    samples, packs = (sum(line.get(name, 0) for line in log) for name in ("samples", "packs"))
    fill = tokens / max(1, packs * budget)
    saved = round(steps * fill / padded) - steps
    recent = [line["loss"] for line in log[-min(RECENT, max(1, steps // 10)) :]]
    window = "the last step" if len(recent) == 1 else f"mean of the last {len(recent)} steps"
    seconds = sum(line.get("eval/seconds", 0.0) for line in evaluations)
    lines = {
        "tokens trained": f"{tokens:,} of {samples:,} samples in {steps:,} steps",
        "fill": f"{fill:.1%}, {samples / max(1, packs):.1f} samples per pack",
        "steps saved": f"{saved:,} of {saved + steps:,} that padding would take "
        f"({saved / max(1, saved + steps):.0%})",
        "loss": f"{log[0]['loss']:.2f} -> {sum(recent) / len(recent):.2f} ({window})",
        "evaluations": f"{seconds:.1f} s in {len(evaluations)}{_metric(evaluations, metric)}",
    }
    return [f"{name:15} {text}" for name, text in lines.items()]


def _metric(evaluations: Sequence[dict], metric: str | None) -> str:
    """Return the metric's first and last value, or its only one."""
    values = [line[name] for line in evaluations if (name := f"eval/{metric}") in line]
    if not values:
        return ""
    ends = values if len(values) == 1 else [values[0], values[-1]]
    return f"; {metric} {' -> '.join(f'{value:.0%}' for value in ends)}"


def plot(
    title: str,
    log: Sequence[dict],
    evaluations: Sequence[dict],
    metric: str | None,
    padded: float,
    budget: int,
) -> str:
    """Draw the loss, the fill, and the metric of the evaluations over the steps, as SVG."""
    panels = [
        Panel("loss", [(line["step"], line["loss"]) for line in log], height=150),
        Panel(
            "fill of the packs",
            [(n["step"], n["tokens"] / (n["packs"] * budget)) for n in log if "packs" in n],
            percent=True,
            level=(padded, f"padded batches: {padded:.0%}"),
        ),
    ]
    scores = [
        (line["step"], line[f"eval/{metric}"]) for line in evaluations if f"eval/{metric}" in line
    ]
    if scores:
        panels.append(Panel(f"evaluation: {metric}", scores, percent=True, dots=True))
    return draw(title, panels)
