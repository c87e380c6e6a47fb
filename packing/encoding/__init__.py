"""Encode rows (text, chats, images, ready tokens) as samples, or once into a corpus on disk."""

from .chat import encode_chat
from .encoder import ENCODE_BATCH, Encoder, encode_rows, raise_or_skip
from .image_encoder import image_sample
from .report import NO_PACKS, SkippedRows

__all__ = [
    "ENCODE_BATCH",
    "NO_PACKS",
    "Encoder",
    "SkippedRows",
    "encode_chat",
    "encode_rows",
    "image_sample",
    "raise_or_skip",
]
