"""A part of the data that is not trained on, and evaluations that continue its prompts.

    rows ─▶ every 50th by its content ─▶ the first of them ─┬─▶ not trained on: prompts and answers
                                                            └─▶ all other rows: packs

A row is known by its own content, so the part is the same for any number of ranks, shards and
restarts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from loading import matched
from nopad.packing.sources import RowSource, open_source
from nopad.trainer.evaluation import Example, GenerationEval

ONE_IN = 50


class LeftOut(RowSource):
    """A source without the rows of these digests."""

    def __init__(self, source: RowSource, without: Iterable[str]):
        self.without = frozenset(without)
        self.source, self.name, self.shards = source, source.name, source.shards
        self.size, self.shuffles = source.size, source.shuffles

    def read(self, shard, shards, cursor=None, shuffle=None):
        rows = self.source.read(shard, shards, cursor, shuffle)
        return (row for row in rows if digest_of(row.value) not in self.without)

    def fingerprint(self) -> str:
        told = hashlib.blake2b("".join(sorted(self.without)).encode(), digest_size=16).hexdigest()
        return f"{self.source.fingerprint()} without {len(self.without)} rows {told}"

    def check_cursor(self, cursor: Any) -> None:
        self.source.check_cursor(cursor)


def digest_of(row: Any) -> str:
    """What a row is known by."""
    text = json.dumps(row, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def chosen(rows: Iterable[Any], count: int) -> dict[str, Example]:
    """The first rows, one of fifty, that have an answer to be held against, by their digests."""
    found: dict[str, Example] = {}
    for row in rows:
        if len(found) == count:
            break
        example, digest = example_of(row), digest_of(row)
        if example is not None and int(digest, 16) % ONE_IN == 0:
            found[digest] = example
    return found


def example_of(row: Any) -> Example | None:
    """The last answer of a conversation and what led to it; None where there is none.

    >>> example_of({"prompt": "1 + 1 =", "completion": " 2"})
    Example(prompt='1 + 1 =', reference=' 2')
    """
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return Example(row["prompt"], row["completion"])
    turns = row.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None  # the encoder names it
    if len(turns) > 1 and turns[-1].get("role") == "assistant":
        answer = turns[-1].get("content")
        return Example(turns[:-1], answer) if isinstance(answer, str) else None
    return None


def split(data: Any, count: int) -> tuple[Any, list[Example]]:
    """The data without at most `count` examples, and those."""
    opened = open_source(data)
    if count == 0 or not isinstance(opened, RowSource):
        return data, []
    held = chosen((row.value for row in opened.read(0, 1)), count)
    return LeftOut(opened, held), list(held.values())


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
