"""Log the completions of an evaluation to TensorBoard, W&B, the console or a file.

Loggers are recognized by their methods, so that none of them has to be installed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .eval_report import Report, TableRow, full_name

log = logging.getLogger(__name__)

MAX_CHARACTERS = 400
"""Characters shown of a text: the last ones of a prompt, the first ones of the others."""

_SHOWN_IF_ANY = ("failed", "timed_out")
"""Counters that the console shows only if they are not zero."""


class ReportWriter:
    """Writes the completions of reports to loggers, and to the console if asked."""

    def __init__(self, console: bool = False):
        self.console = console
        self._has_warned = False

    def write(self, report: Report, loggers: Iterable[Any], metrics: bool = True) -> None:
        """Send a report's rows to every logger that takes text or tables.

        metrics: also print its metrics; off if the trainer has printed them.
        """
        is_shown = self.console or report.is_saved
        columns, data = table(report.rows)
        tag = full_name(report.name, "samples")
        for logger in loggers if report.rows else ():
            if hasattr(logger, "log_table"):
                logger.log_table(tag, columns=columns, data=data, step=report.step)
                is_shown = True
            elif hasattr(logger, "add_text"):
                logger.add_text(tag, markdown(report.rows), report.step)
                is_shown = True
        if self.console and ((metrics and report.metrics) or report.rows or report.error):
            tqdm.write("\n".join(report_lines(report, metrics)))
        if report.rows and not is_shown and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the completions of evaluations are not shown: no logger takes text or tables; "
                "pass console=True to print them, or GenerationEval(output='completions.jsonl') to "
                "write them to a file (Axolotl: nopad_eval_output)"
            )


def append_completions(path: Path, step: int, name: str, rows: Sequence[TableRow]) -> None:
    """Append the completions of one evaluation to a file, as lines of JSON."""
    lines = []
    for row in rows:
        # JSON has no NaN or infinity.
        scores = {key: value if math.isfinite(value) else None for key, value in row.scores.items()}
        line = {"step": step, "evaluation": name, **asdict(row), "scores": scores}
        lines.append(f"{json.dumps(line)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(lines))


def table_logger(logger: Any, inner: str) -> Any:
    """Return the logger if it takes tables, or its attribute `inner` if that takes text.

    TensorBoard's writer is such an attribute. Clients inside other loggers may have a `log_table`
    with other arguments, so theirs is not used.
    """
    if hasattr(logger, "log_table"):
        return logger
    client = getattr(logger, inner, None)
    return client if hasattr(client, "add_text") else None


def report_lines(report: Report, metrics: bool = True) -> list[str]:
    """Return the lines of a `report` for the console: `metrics`, the first error, completions.

    >>> row = TableRow("2+2=", "4", "4")
    >>> report = Report(5, {"eval/exact": 0.5, "eval/failed": 0, "eval/seconds": 0.123}, [row])
    >>> print(*report_lines(report), sep="\\n")
    after 5 steps: exact 0.5, seconds 0.123
      '2+2=' -> '4'
    """
    prefix = full_name(report.name, "")
    shown = {k.removeprefix(prefix): v for k, v in report.metrics.items()} if metrics else {}
    values = ", ".join(f"{k} {v:.4g}" for k, v in shown.items() if v or k not in _SHOWN_IF_ANY)
    title = f"after {report.step} steps{report.name and f', {report.name}'}: {values}".rstrip()
    errors = [] if report.error is None else [f"  error: {' '.join(report.error.split())}"]
    completions = [
        f"  {_tail(row.prompt, 60)!r} -> {row.completion[:MAX_CHARACTERS]!r}" for row in report.rows
    ]
    return [title, *(line[: 2 * MAX_CHARACTERS] for line in errors), *completions]


def table(rows: Sequence[TableRow]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and the lines of a table.

    >>> table([TableRow("2+2=", "4", "4", {"exact": 1.0})])
    (['prompt', 'completion', 'reference', 'exact'], [['2+2=', '4', '4', 1.0]])
    """
    metrics = list(dict.fromkeys(name for row in rows for name in row.scores))
    data = [
        [_tail(row.prompt, MAX_CHARACTERS)]
        + [row.completion[:MAX_CHARACTERS], row.reference[:MAX_CHARACTERS]]
        + [row.scores.get(name) for name in metrics]
        for row in rows
    ]
    return ["prompt", "completion", "reference", *metrics], data


def markdown(rows: Sequence[TableRow]) -> str:
    """Format a table as Markdown, which TensorBoard renders.

    >>> print(markdown([TableRow("a|b", "c\\nd", "", {})]))
    | prompt | completion | reference |
    |---|---|---|
    | a\\|b | c<br>d |  |
    """
    columns, data = table(rows)
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    body = [f"| {' | '.join(map(_cell, line))} |" for line in data]
    return "\n".join([head, *body])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[-length:]
