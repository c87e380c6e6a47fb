"""Rows to samples: text, chats and ready tokens, with a report of rows that were skipped."""

from .ahead import BATCH
from .chat import encode_chat
from .encode_rows import encoded, samples_of
from .encoder import Encoder
from .report import SkippedRows

__all__ = [
    "BATCH",
    "Encoder",
    "SkippedRows",
    "encode_chat",
    "encoded",
    "samples_of",
]
