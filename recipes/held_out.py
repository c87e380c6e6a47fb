"""A part of the data that is not trained on, and evaluations that continue its prompts.

    rows ─▶ every 50th by its content ─┬─▶ not trained on: prompts and answers
                                       └─▶ the rest: packs

A row's own content decides, so the part is the same for any number of ranks, shards and restarts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from loading import matched
from nopad.packing.sources import RowSource, open_source
from nopad.trainer.evaluation import Example, GenerationEval

ONE_IN = 50


class LeftOut(RowSource):
    """A source without its held-out rows."""

    def __init__(self, source: RowSource):
        self.source, self.name, self.shards = source, source.name, source.shards
        self.size, self.shuffles = source.size, source.shuffles

    def read(self, shard, shards, cursor=None, shuffle=None):
        rows = self.source.read(shard, shards, cursor, shuffle)
        return (row for row in rows if not is_held_out(row.value))

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()} but one in {ONE_IN}"

    def check_cursor(self, cursor: Any) -> None:
        self.source.check_cursor(cursor)


def is_held_out(row: Any) -> bool:
    """Whether a row has an answer to be held against, and is one of fifty."""
    if example_of(row) is None:
        return False
    text = json.dumps(row, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % ONE_IN == 0


def example_of(row: Any) -> Example | None:
    """The last answer of a conversation and what led to it; None where there is none.

    >>> example_of({"prompt": "1 + 1 =", "completion": " 2"})
    Example(prompt='1 + 1 =', reference=' 2')
    """
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return Example(row["prompt"], row["completion"])
    turns = row.get("messages") or []
    if len(turns) > 1 and turns[-1].get("role") == "assistant":
        return Example(turns[:-1], turns[-1].get("content") or "")
    return None


def split(data: Any, count: int) -> tuple[Any, list[Example]]:
    """The data without its held-out part, and at most `count` examples of that."""
    opened = open_source(data)
    if count == 0 or not isinstance(opened, RowSource):
        return data, []
    held = (example_of(r.value) for r in opened.read(0, 1) if is_held_out(r.value))
    return LeftOut(opened), [e for e in islice(held, count) if e is not None]


def continuing(
    model: Any, tokenizer: Any, examples: Sequence[Example], every: int, seed: int
) -> GenerationEval:
    """An evaluation that continues examples with the live model, on all ranks."""
    from nopad.inference import Engine, SamplingParams
    from nopad.inference.all_ranks import AllRanks

    return GenerationEval(
        AllRanks(Engine(model, tokenizer)).generate,
        examples,
        {"matched": matched},
        SamplingParams(temperature=0.7, max_tokens=32, seed=seed),
        every=every,
        watch="matched",
    )
