"""Apply metrics to completions, and count those that failed, timed out or were truncated.

    completion ─┬─▶ error or past the deadline: counted
                └─▶ metrics ─┬─▶ means, and rows of the table of completions
                             └─▶ an error: no mean, which would be that of the other examples

A harness returns its own metrics, which are only converted to floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .eval_report import Example, TableRow
from .metrics import Metric

COUNTERS = ("examples", "failed", "timed_out", "truncated", "new_tokens")
"""Counts reported with the metrics: completions scored, failed, and cut off by the deadline; scored
completions that ended at `max_tokens`; generated tokens."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of metrics on completions."""

    values: dict[str, float]
    """The mean of each metric that returned a number every time, and the counters."""
    rows: list[TableRow]
    """One for each completion that was scored."""
    request_errors: str | None = None
    """The first failed request, and how many more failed."""
    metric_errors: str | None = None
    """The first error of each metric, and how many there were: such a metric has no mean."""


def score_completions(
    metrics: Mapping[str, Metric],
    indices: list[int],
    examples: list[Example],
    completions: list[Any],
) -> Scores:
    """Apply the metrics to every completion, including all `n` of a prompt."""
    failed, timed_out, truncated, rows = [], 0, 0, []
    errors: dict[str, list[str]] = {name: [] for name in metrics}
    samples = [
        (index, example, each)
        for index, example, first in zip(indices, examples, completions, strict=True)
        # A user's function may return completions without this attribute of the engine's.
        for each in (first, *getattr(first, "others", ()))
    ]
    for index, example, completion in samples:
        if completion.error is not None:
            failed.append(f"example {index}: {completion.error}")
        elif completion.finish_reason == "deadline":
            timed_out += 1
        else:
            truncated += completion.finish_reason == "length"
            scores = _apply(metrics, index, example, completion, errors)
            rows.append(_table_row(example, completion, scores))
    means = {
        name: sum(row.scores[name] for row in rows) / len(rows)
        for name, faults in errors.items()
        if rows and not faults
    }
    new = sum(len(completion.token_ids) for _, _, completion in samples)
    counts = (len(rows), len(failed), timed_out, truncated, new)
    values = means | dict(zip(COUNTERS, counts, strict=True))
    return Scores(values, rows, _first_of(failed), join_errors(*map(_first_of, errors.values())))


def to_floats(results: Mapping[str, Any]) -> Scores:
    """Convert a harness's results; values that are not numbers become NaN and an error."""
    values, errors = {}, []
    for name, value in dict(results).items():
        try:
            values[name] = float(value)
        except Exception:
            values[name] = math.nan
            errors.append(f"metric {name!r} is a {type(value).__name__}; it must be a number")
    return Scores(values, [], None, _first_of(errors))


def join_errors(*errors: str | None) -> str | None:
    """Return all errors in one line; None if there is none."""
    return "; ".join(error for error in errors if error is not None) or None


def _first_of(errors: list[str]) -> str | None:
    """Return the first error, and how many follow.

    >>> _first_of(["example 3: too long", "example 4: too long"])
    'example 3: too long (and 1 more)'
    """
    if len(errors) < 2:
        return errors[0] if errors else None
    return f"{errors[0]} (and {len(errors) - 1} more)"


def _apply(
    metrics: Mapping[str, Metric],
    index: int,
    example: Example,
    completion: Any,
    errors: dict[str, list[str]],
) -> dict[str, float]:
    """Return the values of the metrics that returned a number; add the errors of the others."""
    values = {}
    for name, metric in metrics.items():
        try:
            value = metric(_text(completion), example.reference)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            errors[name].append(f"metric {name!r} on example {index}: {reason}")
            continue
        try:
            values[name] = float(value)
        except Exception:
            reason = f"it returned a {type(value).__name__}, not a number"
            errors[name].append(f"metric {name!r} on example {index}: {reason}")
    return values


def _text(completion: Any) -> str:
    """Return the text, or the token ids if there is no tokenizer."""
    if completion.text is not None:
        return completion.text
    return " ".join(map(str, completion.token_ids))


def _table_row(example: Example, completion: Any, scores: dict[str, float]) -> TableRow:
    reference = "" if example.reference is None else str(example.reference)
    token_ids = [int(token) for token in completion.token_ids]
    return TableRow(_prompt_text(example.prompt), _text(completion), reference, scores, token_ids)


def _prompt_text(prompt: Any) -> str:
    """Format a prompt for people; a conversation as `role: content` lines.

    >>> _prompt_text([{"role": "user", "content": "How many?"}]), _prompt_text([1, 403])
    ('user: How many?', '[1, 403]')
    """
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt)
