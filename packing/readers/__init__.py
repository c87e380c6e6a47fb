"""Packs of a data set in order, resumable: planned from known lengths, or streamed over shards."""

from .planned import PlannedPacks
from .streamed import StreamedPacks

__all__ = [
    "PlannedPacks",
    "StreamedPacks",
]
