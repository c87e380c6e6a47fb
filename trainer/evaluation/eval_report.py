"""Data classes of an evaluation: `Example` (input), `Report` and `TableRow` (output)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and the reference that its completion is compared with."""

    prompt: Any
    """Text, token ids or messages."""
    reference: Any = None
    """The reference that metrics compare the completion with."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table of completions."""

    prompt: str
    """The prompt as text."""
    completion: str
    """The text that the model generated."""
    reference: str
    """The example's reference as text."""
    scores: dict[str, float] = field(default_factory=dict)
    """The value of each metric."""
    token_ids: list[int] = field(default_factory=list)
    """The token ids of the completion."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an evaluation; the same on every rank, except for the measured seconds."""

    step: int
    """The optimizer step after which it ran."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Values by full name, `eval/…`; empty if the evaluation failed or was skipped."""
    rows: list[TableRow] = field(default_factory=list)
    """The completions to show."""
    seconds: float = 0.0
    """How long the evaluation took."""
    is_best: bool = False
    """Whether the monitored metric has its best value so far."""
    note: str | None = None
    """Why fewer examples were evaluated, or none."""
    error: str | None = None
    """The first failed request and the first error of each metric, with their examples."""
    name: str = ""
    """The evaluation's name, if there are several."""
    missing: tuple[str, ...] = ()
    """Full names of metrics without a value: they failed, or the evaluation failed, ran out of time
    or was skipped."""
    is_saved: bool = False
    """Whether the evaluation has an `output` file."""

    def values(self) -> dict[str, float]:
        """Return every metric, NaN if it is missing, so that monitors never see a stale value.

        >>> Report(4, {"eval/exact": 0.5}, missing=("eval/f1",)).values()
        {'eval/f1': nan, 'eval/exact': 0.5}
        """
        return {**dict.fromkeys(self.missing, math.nan), **self.metrics}


def full_name(evaluation: str, name: str) -> str:
    """Return the name under which a metric or table of an evaluation is logged.

    >>> full_name("", "exact"), full_name("gsm8k", "exact")
    ('eval/exact', 'eval/gsm8k/exact')
    """
    return f"eval/{evaluation}/{name}" if evaluation else f"eval/{name}"
