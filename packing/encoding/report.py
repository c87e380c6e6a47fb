"""What became of the data: packed, split, truncated, dropped, left out; and each source's share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from ..planning.overflow import Counts
from ..sources.source import RowError

NOTHING = "there is nothing to pack: the data is empty, or all was left out or dropped"


@dataclass(slots=True)
class SkippedRows:
    """Rows that were left out, and why the first of them were."""

    rows: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: RowError) -> None:
        """Count one."""
        self.rows += 1
        if len(self.reasons) < 20:
            self.reasons.append(f"{error.where}: {error.reason}")


def report(counts: Counts, drawn: Sequence[int], skipped: SkippedRows, budget: int) -> dict:
    """Put counts into one flat account; `shares` are the sources' shares of all tokens.

    >>> counts = Counts(items=3, tokens=80, packs=1, packed_tokens=80)
    >>> account = report(counts, [60, 20], Skipped(), budget=100)
    >>> account["fill"], account["shares"]
    (0.8, [0.75, 0.25])
    """
    room = counts.packs * budget
    return {
        **asdict(counts),
        "fill": counts.packed_tokens / room if room else 0.0,
        "shares": [int(own) / max(1, sum(map(int, drawn))) for own in drawn],
        "skipped": {"rows": skipped.rows, "reasons": list(skipped.reasons)},
    }


def add_counts(several: Iterable[Counts]) -> Counts:
    """Add up the counts of several planners."""
    total = Counts()
    for counts in several:
        for one in fields(Counts):
            setattr(total, one.name, getattr(total, one.name) + getattr(counts, one.name))
    return total
