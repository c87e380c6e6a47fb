"""Read examples of an evaluation (prompt, reference) from a file or from training rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...packing.sources import TEXT_COLUMN, RowSource, open_source
from .eval_report import Example

PROMPT_CHARS, REFERENCE_CHARS = 160, 40
"""A text's first characters are the prompt; the next ones are the reference."""


def read_examples(path: str | Path) -> list[Example]:
    """Read a file of examples, such as JSON lines of `{"prompt": ..., "completion": ...}`.

    Args:
        path: rows of prompt and completion, or of messages, whose last answer is the reference.
    """
    source = open_source(path)
    if not isinstance(source, RowSource):
        raise ValueError(f"{path} holds tokens: pass rows of prompt and completion, or of messages")
    rows = [row.value for row in source.read(0, 1)]
    examples = [row_example(row, column="") for row in rows]
    if None in examples:
        raise ValueError(
            f"{path}, row {examples.index(None) + 1}: has no reference: pass prompt and "
            "completion, or messages that end with the assistant's answer"
        )
    return [example for example in examples if example is not None]


def row_example(
    row: Any, column: str = TEXT_COLUMN, convert: Callable | None = None
) -> Example | None:
    """Turn a row into a prompt and a reference; None if it has no reference.

    The reference is the completion, the last answer of a conversation, or how a text continues.

    Args:
        row: text, or a dict with `prompt` and `completion`, `messages` or text.
        column: the column with the text.
        convert: turns a row of another layout into one of these.

    >>> row_example({"prompt": "1 + 1 =", "completion": " 2"})
    Example(prompt='1 + 1 =', reference=' 2')
    """
    try:
        row = convert(row) if convert else row
    except ValueError:
        return None  # malformed: the encoder raises and names the row
    match row if isinstance(row, dict) else {column: row}:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Example(prompt, completion)
        case {"messages": [*turns, {"role": "assistant", "content": str(answer)}]} if turns:
            is_chat = all(isinstance(turn, dict) for turn in turns)
            return Example(turns, answer) if is_chat else None
        case {"messages": _}:
            return None
        case other:
            text, end = other.get(column), PROMPT_CHARS + REFERENCE_CHARS
            if not isinstance(text, str) or len(text) <= end:
                return None
            return Example(text[:PROMPT_CHARS], text[PROMPT_CHARS:end])
