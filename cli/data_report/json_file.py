"""`nopad inspect --json`: the figures of the report for programs, with all skipped rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .html_page import DataReport


def write_json(path: Path, report: DataReport, figures: dict[str, Any]) -> None:
    """Write the figures of a report.

    figures: those of the samples, which the report has as text.
    """
    everything = {
        "data": report.name,
        "samples": report.num_samples,
        "tokens": report.num_tokens,
        **figures,
        "lengths": [each._asdict() for each in report.bins],
        "budget": report.budget,
        "budgets": [
            {
                "budget": row.budget,
                "packs": row.packs,
                "fill": row.fill,
                "samples_per_pack": row.samples_per_pack,
                "too_long": row.num_long,
                "padded_fill": row.padded,
            }
            for row in report.rows
        ],
    }
    text = json.dumps(everything, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8", errors="replace")
