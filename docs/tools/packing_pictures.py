"""The pictures of padding and packing, drawn from what the planner really does."""

from __future__ import annotations

import numpy as np
from nopad.packing import pack_lengths
from svg import PALETTE, Canvas

BUDGET = 64
LENGTHS = [64, 12, 7, 30, 18, 5, 41, 9, 26, 14, 6, 52, 21, 11, 8, 34, 16, 7]
"""Documents of natural lengths: many short ones, a few long ones."""
BATCH = 6
"""Documents of a padded batch."""


def padded_and_packed() -> str:
    """The same documents in padded batches and in packs, at one scale."""
    unit, row, left = 5.4, 13, 24
    batches = [range(i, i + BATCH) for i in range(0, len(LENGTHS), BATCH)]
    plan = pack_lengths(LENGTHS, BUDGET, pool=None)
    canvas = Canvas(820, 330, "Padded batches against packs of the same documents")
    padded_tokens = sum(BATCH * max(LENGTHS[i] for i in batch) for batch in batches)
    waste = 1 - sum(LENGTHS) / padded_tokens
    half = 410
    canvas.text(left, 34, "Padded batches", 16, weight=600)
    canvas.text(left, 54, f"{waste:.0%} of the tokens are padding", css="quiet")
    y = 70.0
    for batch in batches:
        width = max(LENGTHS[i] for i in batch)
        for i in batch:
            canvas.rect(left, y, width * unit, row - 2, css="padding", rx=2)
            canvas.rect(left, y, LENGTHS[i] * unit, row - 2, fill=_colour(i), rx=2)
            y += row
        y += 6
    fill = plan.fill(BUDGET)
    canvas.text(left + half, 34, f"{len(plan)} packs of {BUDGET} tokens", 16, weight=600)
    canvas.text(left + half, 54, f"{1 - fill:.0%} of the tokens are empty", css="quiet")
    y = 70.0
    for p in range(len(plan)):
        canvas.rect(left + half, y, BUDGET * unit, row - 2, css="padding", rx=2)
        x, segments = left + half, plan.segments(p)
        for item, length in zip(plan.items[segments], plan.lengths[segments], strict=True):
            canvas.rect(x + 0.5, y, length * unit - 1, row - 2, fill=_colour(int(item)), rx=2)
            x += length * unit
        y += row
    facts = [
        "Each document attends to itself only,",
        "its positions start at 0,",
        "and every label counts once in the mean.",
    ]
    for number, fact in enumerate(facts):
        canvas.text(left + half, y + 34 + 20 * number, fact, css="quiet")
    return canvas.svg()


def _colour(document: int) -> str:
    return PALETTE[document % len(PALETTE)]


def anatomy_of_a_pack() -> str:
    """One pack of three documents: what a batch holds, and which keys each token sees."""
    lengths, words = [4, 2, 3], ["The", "cat", "sat", ".", "Hello", "!", "Packs", "are", "full"]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    documents = np.repeat(np.arange(3), lengths)
    canvas = Canvas(820, 392, "A pack: tokens, positions, labels, boundaries, attention")
    left, cell, top = 128, 52, 62
    canvas.text(20, 34, "One pack of three documents", 16, weight=600)
    for t, (word, document) in enumerate(zip(words, documents, strict=True)):
        x, first = left + t * cell, t in bounds
        canvas.rect(x + 1, top, cell - 2, 30, fill=_colour(int(document)), rx=4)
        middle = {"anchor": "middle"}
        canvas.text(x + cell / 2, top + 20, word, 13, css="on-colour", **middle)
        canvas.text(x + cell / 2, top + 54, str(t - bounds[document]), css="mono", **middle)
        label = ("-100", "quiet mono") if first else (word, "")
        canvas.text(x + cell / 2, top + 82, label[0], 12, css=label[1], **middle)
    for name, offset in (("input_ids", 20), ("position_ids", 54), ("labels", 82)):
        canvas.text(20, top + offset, name, css="mono")
    canvas.text(20, top + 112, "cu_seq_lens", css="mono")
    for bound in bounds:
        x = left + int(bound) * cell
        canvas.line(x, top - 4, x, top + 96)
        canvas.text(x, top + 112, str(bound), css="mono", anchor="middle")
    _mask(canvas, documents, left=20, top=206)
    notes = [
        "A token sees the earlier tokens of its own document: no others exist for it.",
        "The first token of a document has no label: nothing of its document precedes it.",
        "Positions restart, so a document is computed exactly as it would be alone.",
        "The model shifts labels by one, as every causal LM of Transformers does.",
    ]
    canvas.text(228, 224, "What follows from the boundaries", 14, weight=600)
    for number, note in enumerate(notes):
        canvas.text(228, 250 + 24 * number, note, css="quiet")
    return canvas.svg()


def _mask(canvas: Canvas, documents: np.ndarray, left: float, top: float) -> None:
    """Queries down, keys across."""
    size = 18
    for query, own in enumerate(documents):
        for key, other in enumerate(documents):
            seen = key <= query and own == other
            fill = {"fill": _colour(int(own))} if seen else {"css": "padding"}
            canvas.rect(left + key * size, top + query * size, size - 1.5, size - 1.5, rx=2, **fill)
