"""Hold rows out of the training data, and evaluate generation on them.

    rows ─▶ hash of the row % 50 == 0 ─▶ the first `count` ─┬─▶ held out: prompts and references
                                                            └─▶ all other rows: packs

The choice depends only on the content of the rows, not on ranks, shards or restarts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

from nopad.packing.encoding import Encoder
from nopad.packing.sources import TEXT_COLUMN, Row, RowSource, WrappedSource
from nopad.recipes.support.run_dir import is_main_process
from nopad.recipes.support.stdlib_corpus import parses
from nopad.trainer.evaluation import Example, GenerationEval, row_example

ONE_IN = 50
SAMPLING = {"temperature": 0.5, "max_tokens": 48}
"""Greedy completions of a small model repeat themselves, so that its scores jump up and down."""


class ExcludingRows(WrappedSource):
    """A source without the rows that have these digests."""

    def __init__(self, source: RowSource, excluded: Iterable[str]):
        super().__init__(source)
        self.excluded = frozenset(excluded)

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        return self._kept(super().read(shard, shards, cursor, shuffle_key))

    def read_range(self, begin: int, end: int):
        return self._kept(super().read_range(begin, end))

    def _kept(self, rows: Iterator[Row]) -> Iterator[Row]:
        return (row for row in rows if row_digest(row.value) not in self.excluded)

    def fingerprint(self) -> str:
        return self._without_excluded(super().fingerprint())

    def cache_key(self) -> str | None:
        key = super().cache_key()
        return None if key is None else self._without_excluded(key)

    def _without_excluded(self, text: str) -> str:
        digests = "".join(sorted(self.excluded)).encode()
        digest = hashlib.blake2b(digests, digest_size=16).hexdigest()
        return f"{text} without {len(self.excluded)} rows {digest}"


def row_digest(row: Any) -> str:
    """Hash a row's content."""
    text = json.dumps(row, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def hold_out(source: Any, count: int, column: str = TEXT_COLUMN, format: Any = None):
    """Return a source without at most `count` rows, and those rows as examples.

    column, format: how the rows are read, as in `PackedDataset`.
    """
    if count == 0 or not isinstance(source, RowSource):
        return source, []
    rows = (row.value for row in source.read(0, 1))
    examples = pick_examples(rows, count, column, Encoder(None, format=format).format)
    return ExcludingRows(source, examples), list(examples.values())


def pick_examples(
    rows: Iterable, count: int, column: str = TEXT_COLUMN, convert: Callable | None = None
) -> dict[str, Example]:
    """Pick about one in fifty rows, the first `count` that have a reference, by digest.

    At least one is picked, unless no other row with a reference would be left.

    convert: turns a row of another layout into one with text, messages or prompt and completion.
    """
    picked: dict[str, Example] = {}
    seen: dict[str, Example] = {}
    for row in islice(rows, 4 * ONE_IN * count):  # do not read all of data without references
        if len(picked) == count:
            break
        example, digest = row_example(row, column, convert), row_digest(row)
        if example is not None:
            seen[digest] = example
            if int(digest, 16) % ONE_IN == 0:
                picked[digest] = example
    smallest = min(seen, default="")
    return picked or ({smallest: seen[smallest]} if len(seen) > 1 else {})


def matched(text: str, reference: str) -> float:
    """Return the fraction of the reference that the text starts with.

    >>> matched("for key in x", "for i in x!")
    0.36363636363636365
    """
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(text, reference, strict=False))
    return sum(1 for _ in pairs) / max(1, len(reference))


def continuation_evals(args: Any, model: Any, tokenizer: Any, examples: Sequence[Example]):
    """Return the evaluation that continues the examples with the live model; none without any.

    The metric of the default corpus is `parses`, that of other data `matched`. Completions of
    prompts without references are printed, but not scored.
    """
    from nopad.inference import DataParallelEngine, Engine, SamplingParams

    if not examples:
        if is_main_process():
            print(f"no evaluation: {args.data} has fewer than two rows of text to hold out")
        return []
    metric = parses if args.data is None else matched
    scored = all(example.reference is not None for example in examples)
    generate = DataParallelEngine(Engine(model, tokenizer)).generate
    metrics = {metric.__name__: metric} if scored else {}
    params = SamplingParams(**SAMPLING, seed=args.seed)
    return [GenerationEval(generate, examples, metrics, params, every=args.eval_every)]
