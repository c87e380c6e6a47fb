"""`RowSamples`: number the samples of rows; keep file and line, chats, empty answers, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...packing import Sample
from ...packing.encoding import ENCODE_BATCH, Encoder, encode_rows
from ...packing.sources import Row, RowError
from .composition import MAX_LOCATIONS

MAX_CHATS = 512
"""Chats of a source to split into roles, at most."""


@dataclass(slots=True)
class RowSamples:
    """The samples of the rows that were read, numbered over all sources."""

    count: int = 0
    errors: list[RowError] = field(default_factory=list)
    """The first rows that cannot be used."""
    empty_answers: list[int] = field(default_factory=list)
    """Chats in which a turn of the assistant has neither content nor tool calls."""
    chats: list[tuple[Sequence[Any], int]] = field(default_factory=list)
    """The messages of the first chats of each source, and the number of the sample."""
    _locations: dict[int, object] = field(default_factory=dict)

    def locate(self, sample: int) -> str:
        """Return the file and line of a sample; its number if it is not of a row."""
        return str(self._locations.get(sample, f"sample {sample}"))

    def encode(self, rows: Iterator[Row], encoder: Encoder) -> Iterator[Sample | RowError]:
        """Yield the sample of each row of a source, or its error."""
        last_chat = len(self.chats) + MAX_CHATS
        while batch := list(islice(rows, ENCODE_BATCH)):
            for row, result in zip(batch, encode_rows(batch, encoder), strict=True):
                yield result
                # Only now: whoever looks whether there is another sample does not take it.
                if isinstance(result, Sample):
                    self._add(row, encoder, last_chat)
                elif len(self.errors) < MAX_LOCATIONS:
                    self.errors.append(result)

    def add_all(self, rows: Iterator[Row], encoder: Encoder) -> None:
        """Add the rows of a source, all of which can be used, without encoding them."""
        last_chat = len(self.chats) + MAX_CHATS
        for row in rows:
            self._add(row, encoder, last_chat)

    def _add(self, row: Row, encoder: Encoder, last_chat: int) -> None:
        sample = self.count
        self.count += 1
        self._locations[sample] = row.location
        value = row.value if encoder.format is None else encoder.format(row.value)
        if not isinstance(value, dict) or not isinstance(value.get("messages"), list | tuple):
            return
        if any(map(_is_empty_answer, value["messages"])):
            self.empty_answers.append(sample)
        if len(self.chats) < last_chat:
            self.chats.append((value["messages"], sample))


def _is_empty_answer(message: Any) -> bool:
    content = message.get("content")
    is_empty = not (content.strip() if isinstance(content, str) else content)
    return message["role"] == "assistant" and is_empty and not message.get("tool_calls")
