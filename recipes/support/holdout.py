"""Hold rows out of the training data, and evaluate generation on them.

    rows ─▶ hash of the row % 50 == 0 ─▶ the first `count` ─┬─▶ held out: prompts and references
                                                            └─▶ all other rows: packs

If no row of a small set has such a hash, the row with the smallest hash is held out. The choice
depends on the rows' content only, so it is the same for any number of ranks, shards and restarts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

from nopad.packing.encoding import Encoder
from nopad.packing.sources import RowSource, open_source
from nopad.recipes.support import eval_sampling
from nopad.trainer.evaluation import Example, GenerationEval

ONE_IN = 50
PROMPT_CHARS, REFERENCE_CHARS = 160, 40
"""A text's first characters are the prompt; the next ones are the reference."""


class ExcludingRows(RowSource):
    """A source without the rows that have these digests."""

    def __init__(self, source: RowSource, excluded: Iterable[str]):
        self.excluded = frozenset(excluded)
        self.source, self.name, self.default_shards = source, source.name, source.default_shards
        self.num_bytes, self.shuffles_rows = source.num_bytes, source.shuffles_rows

    def read(self, shard, shards, cursor=None, shuffle_key=None):
        rows = self.source.read(shard, shards, cursor, shuffle_key)
        return (row for row in rows if row_digest(row.value) not in self.excluded)

    def fingerprint(self) -> str:
        digests = "".join(sorted(self.excluded)).encode()
        digest = hashlib.blake2b(digests, digest_size=16).hexdigest()
        # Data states that exist contain this text: changing it would make them unusable.
        return f"{self.source.fingerprint()} without {len(self.excluded)} rows {digest}"

    def check_cursor(self, cursor: Any) -> None:
        self.source.check_cursor(cursor)


def row_digest(row: Any) -> str:
    """Hash a row's content."""
    text = json.dumps(row, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def hold_out(
    data: Any, count: int, column: str = "text", format: Any = None
) -> tuple[Any, list[Example]]:
    """Return the data without at most `count` rows, and those rows as examples.

    column, format: how the rows are read, as in `PackedDataset`.
    """
    source = open_source(data, text_column=column)
    if count == 0 or not isinstance(source, RowSource):
        return data, []
    rows = (row.value for row in source.read(0, 1))
    examples = pick_examples(rows, count, column, Encoder(None, format=format).format)
    return ExcludingRows(source, examples), list(examples.values())


def pick_examples(
    rows: Iterable[Any],
    count: int,
    column: str = "text",
    convert: Callable[[Any], Any] | None = None,
) -> dict[str, Example]:
    """Pick about one in fifty rows, the first `count` that have a reference, by digest.

    At least one is picked, unless no other row with a reference would be left.

    convert: turns a row of another layout into one with text, messages or prompt and completion.
    """
    examples: dict[str, Example] = {}
    smallest: tuple[str, Example] | None = None
    seen = set()
    for row in islice(rows, 4 * ONE_IN * count):  # do not read all of data without references
        if len(examples) == count:
            break
        example, digest = row_example(row, column, convert), row_digest(row)
        if example is None:
            continue
        seen.add(digest)
        if int(digest, 16) % ONE_IN == 0:
            examples[digest] = example
        if smallest is None or digest < smallest[0]:
            smallest = digest, example
    return examples or ({} if smallest is None or len(seen) < 2 else dict([smallest]))


def row_example(
    row: Any, column: str = "text", convert: Callable[[Any], Any] | None = None
) -> Example | None:
    """Turn a row into a prompt and a reference; None if it has no reference.

    The reference is the completion, the last answer of a conversation, or how a text continues.

    >>> row_example({"prompt": "1 + 1 =", "completion": " 2"})
    Example(prompt='1 + 1 =', reference=' 2')
    """
    if convert is not None:
        try:
            row = convert(row)
        except ValueError:
            return None  # malformed: the encoder raises and names the row
    if isinstance(row, str):
        return prefix_example(row)
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return Example(row["prompt"], row["completion"])
    if "messages" not in row and isinstance(row.get(column), str):
        return prefix_example(row[column])
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        return None  # malformed: the encoder raises and names the row
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        answer = messages[-1].get("content")
        return Example(messages[:-1], answer) if isinstance(answer, str) else None
    return None


def prefix_example(text: str) -> Example | None:
    """Split a text's beginning into a prompt and a reference; None if it is too short."""
    end = PROMPT_CHARS + REFERENCE_CHARS
    return Example(text[:PROMPT_CHARS], text[PROMPT_CHARS:end]) if len(text) > end else None


def matched(text: str, reference: str) -> float:
    """Return the fraction of the reference that the text starts with.

    >>> matched("for key in x", "for i in x!")
    0.36363636363636365
    """
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(text, reference, strict=False))
    return sum(1 for _ in pairs) / max(1, len(reference))


def continuation_eval(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    every: int,
    seed: int,
    metric: Callable[[str, Any], float] = matched,
) -> GenerationEval:
    """Build an evaluation that continues the examples with the live model, on all ranks.

    metric: scores the completions, under its own name. Completions of prompts without references
        are printed but not scored.
    """
    from nopad.inference import DataParallelEngine, Engine, SamplingParams

    scored = all(example.reference is not None for example in examples)
    return GenerationEval(
        DataParallelEngine(Engine(model, tokenizer)).generate,
        examples,
        {metric.__name__: metric} if scored else {},
        SamplingParams(
            temperature=eval_sampling.TEMPERATURE, max_tokens=eval_sampling.MAX_TOKENS, seed=seed
        ),
        every=every,
        monitor=metric.__name__ if scored else None,
    )
