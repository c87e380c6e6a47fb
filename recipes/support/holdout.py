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
from itertools import islice, takewhile
from typing import Any

from nopad.packing.sources import RowSource, open_source
from nopad.trainer.evaluation import Example, GenerationEval

ONE_IN = 50
BEGINNING, GOES_ON = 160, 40
"""Letters of a text that are given, and that its continuation is held against."""


class LeftOut(RowSource):
    """A source without the rows of these digests."""

    def __init__(self, source: RowSource, without: Iterable[str]):
        self.without = frozenset(without)
        self.source, self.name, self.default_shards = source, source.name, source.default_shards
        self.num_bytes, self.shuffles_rows = source.num_bytes, source.shuffles_rows

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        rows = self.source.read(shard, shards, cursor, shuffle_key)
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


def chosen(rows: Iterable[Any], count: int, column: str = "text") -> dict[str, Example]:
    """The first rows, one of fifty, that have an answer to be held against, by their digests."""
    found: dict[str, Example] = {}
    for row in islice(rows, 4 * ONE_IN * count):  # data without answers is not read to its end
        if len(found) == count:
            break
        example, digest = example_of(row, column), digest_of(row)
        if example is not None and int(digest, 16) % ONE_IN == 0:
            found[digest] = example
    return found


def example_of(row: Any, column: str = "text") -> Example | None:
    """The last answer of a conversation and what led to it, or a text's beginning and how it goes
    on; None where there is neither.

    >>> example_of({"prompt": "1 + 1 =", "completion": " 2"})
    Example(prompt='1 + 1 =', reference=' 2')
    """
    if isinstance(row, str):
        return beginning_of(row)
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return Example(row["prompt"], row["completion"])
    if "messages" not in row and isinstance(row.get(column), str):
        return beginning_of(row[column])
    turns = row.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None  # the encoder names it
    if len(turns) > 1 and turns[-1].get("role") == "assistant":
        answer = turns[-1].get("content")
        return Example(turns[:-1], answer) if isinstance(answer, str) else None
    return None


def beginning_of(text: str) -> Example | None:
    """A text's beginning, and how it goes on; None where it is short."""
    until = BEGINNING + GOES_ON
    return Example(text[:BEGINNING], text[BEGINNING:until]) if len(text) > until else None


def split(data: Any, count: int, column: str = "text") -> tuple[Any, list[Example]]:
    """The data without at most `count` examples, and those."""
    opened = open_source(data, text_column=column)
    if count == 0 or not isinstance(opened, RowSource):
        return data, []
    held = chosen((row.value for row in opened.read(0, 1)), count, column)
    return LeftOut(opened, held), list(held.values())


def matched(text: str, reference: str) -> float:
    """Give the share of the reference that the text begins with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(text, reference, strict=False))
    return sum(1 for _ in pairs) / max(1, len(reference))


def continuing(
    model: Any, tokenizer: Any, examples: Sequence[Example], every: int, seed: int
) -> GenerationEval:
    """An evaluation that continues examples with the live model, on all ranks.

    Prompts of one's own, which have no reference, are shown and not measured.
    """
    from nopad.inference import DataParallelEngine, Engine, SamplingParams

    measured = all(example.reference is not None for example in examples)
    return GenerationEval(
        DataParallelEngine(Engine(model, tokenizer)).generate,
        examples,
        {"matched": matched} if measured else {},
        SamplingParams(temperature=0.7, max_tokens=32, seed=seed),
        every=every,
        watch="matched" if measured else None,
    )
