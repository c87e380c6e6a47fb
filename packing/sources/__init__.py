"""Where documents come from: files, folders, datasets, lists and streams."""

from .open_source import open_source
from .source import Row, RowError, RowSource

__all__ = [
    "Row",
    "RowError",
    "RowSource",
    "open_source",
]
