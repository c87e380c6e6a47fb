"""Where documents come from: files, folders, datasets, lists and streams."""

from .open_source import open_source
from .source import Row, RowError, RowSource
from .token_array import TokenArray
from .token_store import TokenStore

__all__ = [
    "Row",
    "RowError",
    "RowSource",
    "TokenArray",
    "TokenStore",
    "open_source",
]
