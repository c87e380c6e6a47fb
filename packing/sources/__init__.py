"""Open sources of documents: files, folders, URLs, datasets, lists and streams."""

from .corpus import find_damage
from .local_folder import open_folder
from .null_fields import drop_null_fields
from .open_source import open_source
from .source import TEXT_COLUMN, Row, RowError, RowSource
from .token_store import TokenArray, TokenStore
from .wrapped_source import WrappedSource

__all__ = [
    "TEXT_COLUMN",
    "Row",
    "RowError",
    "RowSource",
    "TokenArray",
    "TokenStore",
    "WrappedSource",
    "drop_null_fields",
    "find_damage",
    "open_folder",
    "open_source",
]
