"""What an evaluation found, as loggers and front ends take it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of samples."""

    prompt: str
    completion: str
    reference: str
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """What an evaluation found; the same on every rank, but for the seconds that each counts."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """By full name, `eval/…`; empty where nothing was found out."""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    is_best: bool = False
    """Whether the watched metric is better than ever before."""
    note: str | None = None
    """Why less than everything was evaluated."""
    error: str | None = None
    """What went wrong, in which example."""
    name: str = ""
    """Which evaluation this was, where there are several."""
    unknown: tuple[str, ...] = ()
    """Full names of metrics that have no value: all failed, came late, or was left out."""

    def values(self) -> dict[str, float]:
        """Give every metric, NaN where there is none: no monitor takes an older value for new.

        >>> Report(4, {"eval/exact": 0.5}, unknown=("eval/f1",)).values()
        {'eval/f1': nan, 'eval/exact': 0.5}
        """
        return {**dict.fromkeys(self.unknown, math.nan), **self.metrics}


def full_name(evaluation: str, name: str) -> str:
    """The name that a metric or a table of an evaluation is logged under.

    >>> full_name("", "exact"), full_name("gsm8k", "exact")
    ('eval/exact', 'eval/gsm8k/exact')
    """
    return f"eval/{evaluation}/{name}" if evaluation else f"eval/{name}"
