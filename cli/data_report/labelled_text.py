"""The samples of a pack as text, in spans that count for the loss and spans that do not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from ...packing import IGNORE_INDEX, Pack

MAX_SAMPLES = 16
"""Samples to show of a pack."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""A character whose other bytes are in the next token."""


class Span(NamedTuple):
    """Text whose tokens all count for the loss, or all do not."""

    text: str
    in_loss: bool


def labelled_samples(pack: Pack, tokenizer: Any, max_chars: int) -> list[tuple[int, list[Span]]]:
    """Return the length and the spans of a pack's first samples; long spans are cut in the middle.

    tokenizer: None shows token ids.

    >>> from nopad.packing import Sample
    >>> sample = Sample(np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8]))
    >>> labelled_samples(Pack.of([sample], 8), None, 80)
    [(4, [Span(text='5 6', in_loss=False), Span(text='7 8', in_loss=True)])]
    """
    samples = []
    for a, b in islice(pairwise(pack.cu_seqlens.tolist()), MAX_SAMPLES):
        in_loss = pack.labels[a:b] != IGNORE_INDEX
        edges = [0, *(np.flatnonzero(np.diff(in_loss)) + 1).tolist(), int(b - a)]
        texts = _decode(np.split(pack.tokens[a:b], edges[1:-1]), tokenizer)
        spans = [
            Span(_shorten(text, max_chars), bool(in_loss[start]))
            for text, start in zip(texts, edges[:-1], strict=True)
        ]
        samples.append((b - a, spans))
    return samples


def _decode(parts: list[np.ndarray], tokenizer: Any) -> Iterator[str]:
    """Return the text of each part as it reads after the part before it.

    Alone, the first token of a part loses its space in many tokenizers.
    """
    if tokenizer is None:
        yield from (" ".join(map(str, ids.tolist())) for ids in parts)
        return
    yield tokenizer.decode(parts[0])
    for before, ids in pairwise(parts):
        read = tokenizer.decode(before).rstrip(INCOMPLETE)
        yield tokenizer.decode(np.concatenate([before, ids]))[len(read) :]


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]} … {text[-max_chars // 2 :]}"
