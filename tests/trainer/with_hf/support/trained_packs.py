"""The packs that a trainer trains on, and those of the data."""

from __future__ import annotations

import tiny_run
from nopad.packing import PackedDataset


def trained(run, **settings) -> list[list[int]]:
    """Train, and return the tokens of every batch."""
    batches, step = [], run.training_step

    def note(model, inputs, *rest):
        batches.append(inputs["input_ids"].flatten().tolist())
        return step(model, inputs, *rest)

    run.training_step = note
    try:
        run.train(**settings)
    finally:
        run.training_step = step
    return batches


def tokens_of(data: PackedDataset, count: int) -> list[list[int]]:
    return [pack.tokens.tolist() for pack in tiny_run.packs(data, count)]
