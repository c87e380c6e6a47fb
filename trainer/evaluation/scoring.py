"""Apply metrics to completions, and count those that failed, timed out or were truncated.

    completion ─┬─▶ error or past the deadline: counted
                └─▶ metrics ─▶ means, and rows of the table of completions

A harness returns metrics of its own; they are only converted to floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .metrics import Metric
from .report import Example, TableRow

COUNTERS = ("examples", "failed", "timed_out", "truncated", "new_tokens")
"""Reported beside the metrics: examples that were scored, that failed, that the deadline ended; of
the scored ones those that ended at `max_tokens`; and all generated tokens."""


def score_completions(
    metrics: Mapping[str, Metric],
    indices: list[int],
    examples: list[Example],
    completions: list[Any],
) -> tuple[dict[str, float], list[TableRow], str | None]:
    """Return the mean of each metric with the counters, the table rows, and the first error."""
    error, rows, failed, timed_out, truncated = None, [], 0, 0, 0
    scores: dict[str, list[float]] = {name: [] for name in metrics}
    for index, example, completion in zip(indices, examples, completions, strict=True):
        if completion.error is not None:
            failed += 1
            error = error or f"example {index}: {completion.error}"
        elif completion.finish_reason == "deadline":
            timed_out += 1
        else:
            truncated += completion.finish_reason == "length"
            values, metric_error = _apply(metrics, index, example, completion)
            error = error or metric_error
            for name, value in values.items():
                scores[name].append(value)
            rows.append(_table_row(example, completion, values))
    means = {name: sum(values) / len(values) for name, values in scores.items() if values}
    new = sum(len(completion.token_ids) for completion in completions)
    counts = (len(rows), failed, timed_out, truncated, new)
    return means | dict(zip(COUNTERS, counts, strict=True)), rows, error


def to_floats(results: Mapping[str, Any]) -> tuple[dict[str, float], str | None]:
    """Convert a harness's results; values that are not numbers become NaN and an error."""
    values, error = {}, None
    for name, value in dict(results).items():
        try:
            values[name] = float(value)
        except Exception:
            values[name] = math.nan
            error = error or f"metric {name!r} is a {type(value).__name__}; it must be a number"
    return values, error


def _apply(
    metrics: Mapping[str, Metric], index: int, example: Example, completion: Any
) -> tuple[dict[str, float], str | None]:
    """Return the values of the metrics that did not raise, and the first error."""
    values, first_error = {}, None
    for name, metric in metrics.items():
        try:
            values[name] = float(metric(_text(completion), example.reference))
        except Exception as error:
            message = f"metric {name!r} on example {index}: {type(error).__name__}: {error}"
            first_error = first_error or message
    return values, first_error


def _text(completion: Any) -> str:
    """Return the text, or the token ids if there is no tokenizer."""
    if completion.text is not None:
        return completion.text
    return " ".join(map(str, completion.token_ids))


def _table_row(example: Example, completion: Any, scores: dict[str, float]) -> TableRow:
    reference = "" if example.reference is None else str(example.reference)
    return TableRow(_prompt_text(example.prompt), _text(completion), reference, scores)


def _prompt_text(prompt: Any) -> str:
    """Format a prompt for people; a conversation as `role: content` lines.

    >>> _prompt_text([{"role": "user", "content": "How many?"}]), _prompt_text([1, 403])
    ('user: How many?', '[1, 403]')
    """
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt)
