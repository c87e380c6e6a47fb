"""The implementations behind `attend`, and the selection of one for each call."""

from .call_spec import Ask, NotInAGraph, Scores
from .selection import PAGED, reader_of_pages, reading_pages_by

__all__ = [
    "PAGED",
    "Ask",
    "NotInAGraph",
    "Scores",
    "reader_of_pages",
    "reading_pages_by",
]
