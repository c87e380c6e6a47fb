"""Samples of an evaluation where people look at them: TensorBoard text, a W&B table, the console.

Loggers are told by what they can do, so that none has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from .evaluation import Report, Row

WIDTH = 400
"""Characters of a text that are shown; of a prompt the last ones, of the others the first."""


def show(report: Report, loggers: Iterable[Any], console: bool = False) -> None:
    """Send a report's rows to whatever takes text or tables."""
    if not report.rows:
        return
    columns, data = table(report.rows)
    for logger in loggers:
        if hasattr(logger, "log_table"):
            logger.log_table("eval/samples", columns=columns, data=data, step=report.step)
        elif hasattr(logger, "add_text"):
            logger.add_text("eval/samples", markdown(report.rows), report.step)
    if console:
        tqdm.write(f"after {report.step} steps:")
        for row in report.rows:
            tqdm.write(f"  {_tail(row.prompt, 60)!r} -> {row.completion[:WIDTH]!r}")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Columns and lines.

    >>> table([Row("2+2=", "4", "4", {"exact": 1.0})])
    (['prompt', 'completion', 'reference', 'exact'], [['2+2=', '4', '4', 1.0]])
    """
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    lines = [
        [_tail(row.prompt, WIDTH), row.completion[:WIDTH], row.reference[:WIDTH]]
        + [row.scores.get(name) for name in names]
        for row in rows
    ]
    return ["prompt", "completion", "reference", *names], lines


def markdown(rows: Sequence[Row]) -> str:
    """The same as TensorBoard renders it.

    >>> print(markdown([Row("a|b", "c\\nd", "", {})]))
    | prompt | completion | reference |
    |---|---|---|
    | a\\|b | c<br>d |  |
    """
    columns, lines = table(rows)
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    body = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
    return "\n".join([head, *body])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length:]
