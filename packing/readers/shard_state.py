"""The state of a shard as short text: JSON, compressed, in base64."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode

import numpy as np

from ..state.int_codec import ints_from_text, ints_to_text

STATE_LIMIT = 8 << 20
"""Decompressed bytes of a shard's state; a joined stream's own state may be most of them."""


def compress_state(state: dict) -> str:
    """Encode a shard's state, or raise if it is too large to be decoded again."""
    data = json.dumps(state, separators=(",", ":")).encode()
    if len(data) > STATE_LIMIT:
        raise ValueError(
            f"a shard's state has {len(data)} bytes, the limit is {STATE_LIMIT}: a stream is "
            "joined from too many datasets; join fewer, or mix some as [(dataset, weight), ...]"
        )
    return b64encode(zlib.compress(data, 6)).decode()


def decompress_state(text: str) -> dict:
    """Decode the text of `compress_state`, never to more than the limit."""
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(b64decode(text, validate=True), STATE_LIMIT)
        if decompressor.unconsumed_tail:
            raise ValueError(f"it decompresses to more than {STATE_LIMIT} bytes")
        state = json.loads(data)
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise ValueError(f"a shard's state cannot be read: {error}") from None
    if not isinstance(state, dict) or "packer" not in state:
        raise ValueError("not a shard state")
    return state


def increasing_to_text(numbers: np.ndarray) -> str:
    """Encode increasing numbers by their differences, which are small."""
    return ints_to_text(np.diff(numbers, prepend=0))


def increasing_from_text(text: str) -> np.ndarray:
    """Decode the text of `increasing_to_text`."""
    return np.cumsum(ints_from_text(text))
