"""The samples of a pack as text, in spans of tokens that count for the loss and of others."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from ...packing import IGNORE_INDEX, Pack

MAX_SAMPLES = 16
"""Samples to show of a pack."""


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
        spans = [
            Span(
                _decode(pack.tokens[a + start : a + end], tokenizer, max_chars),
                bool(in_loss[start]),
            )
            for start, end in pairwise(edges)
        ]
        samples.append((b - a, spans))
    return samples


def _decode(ids: np.ndarray, tokenizer: Any, max_chars: int) -> str:
    text = " ".join(map(str, ids.tolist())) if tokenizer is None else tokenizer.decode(ids)
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]} … {text[-max_chars // 2 :]}"
