"""What became of the data: packed, split, truncated, dropped, left out; and each source's share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from .ahead import Skipped
from .overflow import Counts


def report(counts: Counts, drawn: Sequence[int], skipped: Skipped, budget: int) -> dict:
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
        for field in fields(Counts):
            setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
    return total
