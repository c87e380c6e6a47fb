"""Build the dict of `data.report()` from planner counts, skipped rows and tokens by source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from ..planning.planner import Counts
from ..sources.source import RowError

NO_PACKS = (
    "there is nothing to pack: the data is empty, all of it was skipped or dropped, or max_packs= "
    "ends before the first pack"
)
MAX_REASONS = 20


@dataclass(slots=True)
class SkippedRows:
    """The number of skipped rows, and the reasons of the first ones."""

    rows: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: RowError) -> None:
        """Count one row."""
        self.rows += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(f"{error.location}: {error.reason}")

    def merge(self, other: SkippedRows) -> None:
        """Add the rows of another count."""
        self.rows += other.rows
        self.reasons += other.reasons[: MAX_REASONS - len(self.reasons)]


def build_report(
    counts: Counts, tokens_drawn: Sequence[int], skipped: SkippedRows, budget: int
) -> dict:
    """Combine counts into one flat dict; `shares` are the sources' fractions of all tokens.

    >>> counts = Counts(items=3, tokens=80, packs=1, packed_tokens=80)
    >>> report = build_report(counts, [60, 20], SkippedRows(), budget=100)
    >>> report["fill"], report["shares"]
    (0.8, [0.75, 0.25])
    """
    capacity = counts.packs * budget
    return {
        **asdict(counts),
        "fill": counts.packed_tokens / capacity if capacity else 0.0,
        "shares": [int(tokens) / max(1, sum(map(int, tokens_drawn))) for tokens in tokens_drawn],
        "skipped": {"rows": skipped.rows, "reasons": list(skipped.reasons)},
    }


def add_counts(several: Iterable[Counts]) -> Counts:
    """Add the counts of several planners."""
    total = Counts()
    for counts in several:
        for counter in fields(Counts):
            value = getattr(total, counter.name) + getattr(counts, counter.name)
            setattr(total, counter.name, value)
    return total
