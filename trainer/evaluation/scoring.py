"""What completions are worth: every metric on every one of them, and a count of what is missing.

    completion ─┬─▶ error, or too late: counted
                └─▶ metrics ─▶ means, and rows of a table of samples

A harness has judged already; it is only seen to that what it gives are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .metrics import Metric
from .report import Row

if TYPE_CHECKING:
    from .generation_eval import Example

COUNTS = ("examples", "failed", "unfinished", "new_tokens")
"""What is found out beside the metrics."""


def judge(
    metrics: Mapping[str, Metric],
    numbers: list[int],
    examples: list[Example],
    completions: list[Any],
) -> tuple[dict[str, float], list[Row], str | None]:
    """Apply the metrics to what was completed; count what was not, and name the first."""
    error, rows, failed, late = None, [], 0, 0
    scores: dict[str, list[float]] = {name: [] for name in metrics}
    for number, example, completion in zip(numbers, examples, completions, strict=True):
        if completion.error is not None:
            failed += 1
            error = error or f"example {number}: {completion.error}"
        elif completion.finish_reason == "deadline":
            late += 1
        else:
            own, trouble = _apply(metrics, number, example, completion)
            error = error or trouble
            for name, value in own.items():
                scores[name].append(value)
            rows.append(_row(example, completion, own))
    found = {name: sum(values) / len(values) for name, values in scores.items() if values}
    new = sum(len(completion.token_ids) for completion in completions)
    found |= dict(zip(COUNTS, (len(rows), failed, late, new), strict=True))
    return found, rows, error


def read_numbers(found: Mapping[str, Any]) -> tuple[dict[str, float], str | None]:
    """What a harness gave, NaN where it is no number, and what the first of those is."""
    values, error = {}, None
    for name, value in dict(found).items():
        try:
            values[name] = float(value)
        except Exception:
            values[name] = math.nan
            error = error or f"metric {name!r} is a {type(value).__name__}; it must be a number"
    return values, error


def _apply(
    metrics: Mapping[str, Metric], number: int, example: Example, completion: Any
) -> tuple[dict[str, float], str | None]:
    """The value of each metric that gave one, and what the first other one raised."""
    values, error = {}, None
    for name, metric in metrics.items():
        try:
            values[name] = float(metric(_text(completion), example.reference))
        except Exception as raised:
            trouble = f"metric {name!r} on example {number}: {type(raised).__name__}: {raised}"
            error = error or trouble
    return values, error


def _text(completion: Any) -> str:
    """Text, or the ids where there is no tokenizer."""
    if completion.text is not None:
        return completion.text
    return " ".join(map(str, completion.token_ids))


def _row(example: Example, completion: Any, scores: dict[str, float]) -> Row:
    reference = "" if example.reference is None else str(example.reference)
    return Row(_shown(example.prompt), _text(completion), reference, scores)


def _shown(prompt: Any) -> str:
    """A prompt as people read it: of a conversation, who says what.

    >>> _shown([{"role": "user", "content": "How many?"}]), _shown([1, 403])
    ('user: How many?', '[1, 403]')
    """
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt)
