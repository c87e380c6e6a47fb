"""Arrays of non-negative integers as short text, for states that are saved as JSON.

The text is the width of an entry in bytes, then the entries in base64: 1024 lengths up to 65535
take 2.7 kB, a third of a JSON list.
"""

from __future__ import annotations

import base64

import numpy as np


def ints_to_text(values: np.ndarray) -> str:
    """Encode integers >= 0 as text.

    >>> ints_to_text(np.array([1, 2, 300])), ints_from_text("2:AQACACwB").tolist()
    ('2:AQACACwB', [1, 2, 300])
    """
    largest = int(values.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if largest < 256**w)
    return f"{width}:{base64.b64encode(values.astype(f'<u{width}').tobytes()).decode()}"


def ints_from_text(text: str) -> np.ndarray:
    """Decode the text of `ints_to_text` as int64."""
    width, _, entries = text.partition(":")
    if width not in ("1", "2", "4", "8"):
        raise ValueError(f"not integers written by nopad: {text[:20]!r}")
    return np.frombuffer(base64.b64decode(entries, validate=True), f"<u{width}").astype(np.int64)
