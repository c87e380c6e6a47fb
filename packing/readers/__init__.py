"""Packs of a data set in order, resumable: planned from known lengths, or streamed over shards."""

from .estimate import estimate_report
from .planned import PLANNED_POOL, WINDOW_DOCUMENTS, PlannedPacks
from .streamed import StreamedPacks

__all__ = [
    "PLANNED_POOL",
    "WINDOW_DOCUMENTS",
    "PlannedPacks",
    "StreamedPacks",
    "estimate_report",
]
