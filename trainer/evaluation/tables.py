"""Samples of an evaluation where people look at them: TensorBoard text, a W&B table, the console.

Loggers are told by what they can do, so that none has to be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from tqdm import tqdm

from .report import Report, Row, full_name

log = logging.getLogger(__name__)

WIDTH = 400
"""Characters of a text that are shown; of a prompt the last ones, of the others the first."""


def show(report: Report, loggers: Iterable[Any], console: bool = False) -> None:
    """Send a report's rows to whatever takes text or tables; on a console, its metrics too."""
    taken = console
    columns, data = table(report.rows)
    tag = full_name(report.name, "samples")
    for logger in loggers if report.rows else ():
        if hasattr(logger, "log_table"):
            logger.log_table(tag, columns=columns, data=data, step=report.step)
            taken = True
        elif hasattr(logger, "add_text"):
            logger.add_text(tag, markdown(report.rows), report.step)
            taken = True
    if console and (report.metrics or report.rows):
        tqdm.write("\n".join(lines(report)))
    if report.rows and not taken:
        _say_once()


def writer(logger: Any, inside: str) -> Any:
    """The logger if it takes tables, else what is inside it if that takes text, as TensorBoard's.

    Clients inside others' loggers have a `log_table` of other arguments.
    """
    if hasattr(logger, "log_table"):
        return logger
    found = getattr(logger, inside, None)
    return found if hasattr(found, "add_text") else None


def lines(report: Report) -> list[str]:
    """What the console shows: the metrics, what went wrong first, and samples.

    >>> row = Row("2+2=", "4", "4")
    >>> print(*lines(Report(5, {"eval/exact": 0.5, "eval/seconds": 0.123}, [row])), sep="\\n")
    after 5 steps: exact 0.5, seconds 0.123
      '2+2=' -> '4'
    """
    start = full_name(report.name, "")
    named = ", ".join(f"{k.removeprefix(start)} {v:.4g}" for k, v in report.metrics.items())
    title = f"after {report.step} steps{report.name and f', {report.name}'}: {named}"
    wrong = [] if report.error is None else [f"  went wrong: {' '.join(report.error.split())}"]
    shown = [f"  {_tail(r.prompt, 60)!r} -> {r.completion[:WIDTH]!r}" for r in report.rows]
    return [title, *(line[: 2 * WIDTH] for line in wrong), *shown]


@cache
def _say_once() -> None:
    log.warning("samples of evaluations are shown nowhere: no logger takes text; console=True does")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Columns and lines.

    >>> table([Row("2+2=", "4", "4", {"exact": 1.0})])
    (['prompt', 'completion', 'reference', 'exact'], [['2+2=', '4', '4', 1.0]])
    """
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    data = [
        [_tail(row.prompt, WIDTH), row.completion[:WIDTH], row.reference[:WIDTH]]
        + [row.scores.get(name) for name in names]
        for row in rows
    ]
    return ["prompt", "completion", "reference", *names], data


def markdown(rows: Sequence[Row]) -> str:
    """The same as TensorBoard renders it.

    >>> print(markdown([Row("a|b", "c\\nd", "", {})]))
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
