"""Rows to samples: text, prompt and completion, chat messages, or ready token ids.

    {"text": ...}                     ids + eos                 every token but the first counts
    {"prompt": ..., "completion": ...} ids of both + eos        the completion counts
    {"messages": [...], "tools"?}     the tokenizer's template  the assistant's turns count
    {"input_ids": [...], "labels"?}   as they are, checked      the labels say what counts

Text is tokenized in batches. A row that cannot be read becomes a ValueError in its place, so that
its neighbours are unharmed and whoever asked can raise it or leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .chat import encode_chat
from .ids import check_masks, checked_ids, checked_sample
from .sample import IGNORE, Sample


class Encoder:
    """Turns rows into samples with one tokenizer and one set of choices.

    >>> encoder = Encoder(lambda text: [ord(letter) for letter in text], eos=0)
    >>> encoder.encode([{"text": "ab"}])[0].tokens.tolist()
    [97, 98, 0]
    >>> encoder.encode([{"prompt": "a", "completion": "b"}])[0].labels.tolist()
    [-100, 98, 0]
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        column: str = "text",
        eos: bool | int = True,
        vocab_size: int | None = None,
    ):
        """Choose how rows are read.

        tokenizer: a Hugging Face tokenizer, or any function from text to ids.
        column: where the text stands in a row.
        eos: end documents with the tokenizer's eos (True), with this id, or not at all (False).
        """
        self.tokenizer = tokenizer
        self.column = column
        self.eos = _eos_id(tokenizer, eos)
        self._lacks_eos = eos is True and self.eos is None and hasattr(tokenizer, "get_vocab")
        self.vocab_size = _known_ids(tokenizer) if vocab_size is None else vocab_size

    def encode(self, rows: Sequence[Any]) -> list[Sample | ValueError]:
        """Give the sample of each row, or the reason why there is none."""
        out: list[Any] = [None] * len(rows)
        heads: dict[int, str] = {}
        tails: dict[int, str] = {}
        for i, row in enumerate(rows):
            try:
                texts = self._texts_of(row)
                if texts is None:
                    out[i] = self._encode_row(row)
                    continue
                heads[i] = texts[0]
                if len(texts) == 2:
                    tails[i] = texts[1]
            except Exception as error:  # a tokenizer or its template may raise anything
                out[i] = _as_value_error(error)
        if heads:
            self._check_end()
        found = zip(heads, self._ids_of_all(list(heads.values()), special=True), strict=True)
        ends = dict(zip(tails, self._ids_of_all(list(tails.values()), special=False), strict=True))
        for i, ids in found:
            try:
                out[i] = self._joined(ids, ends.get(i))
            except ValueError as error:
                out[i] = error
        return out

    def _texts_of(self, row: Any) -> tuple[str, ...] | None:
        """Give the row's text, or its prompt and completion; None if it is no such row."""
        if isinstance(row, str):
            return (_text(row, "text"),)
        if not isinstance(row, Mapping) or "input_ids" in row or "messages" in row:
            return None
        if self.column in row:
            return (_text(row[self.column], self.column),)
        pair = [row.get(name) for name in ("prompt", "completion")]
        if "prompt" not in row or "completion" not in row or any(isinstance(p, list) for p in pair):
            return None
        return _text(pair[0], "prompt"), _text(pair[1], "completion")

    def _joined(self, ids: np.ndarray | ValueError, tail: np.ndarray | ValueError | None) -> Sample:
        """Build the sample of a text, or of a prompt that does not count and its completion."""
        if isinstance(ids, ValueError):
            raise ids
        if isinstance(tail, ValueError):
            raise tail
        if tail is None:
            return checked_sample(self._ended(ids), None, self.vocab_size)
        if len(ids) and ids[-1] == self.eos:
            ids = ids[:-1]  # a tokenizer that ends every text must not end the prompt
        after = checked_ids(self._ended(tail), "completion")
        labels = np.concatenate([np.full(len(ids), IGNORE), after])
        return checked_sample(np.concatenate([ids, after]), labels, self.vocab_size)

    def _encode_row(self, row: Any) -> Sample:
        if isinstance(row, Sample):
            return checked_sample(row.tokens, row.labels, self.vocab_size)
        if isinstance(row, list | tuple) or hasattr(row, "__array__"):
            return checked_sample(row, None, self.vocab_size)
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must be a dict, text or token ids, got {type(row).__name__}")
        if "input_ids" in row:
            check_masks(row, row.get("attention_mask"))
            return checked_sample(row["input_ids"], row.get("labels"), self.vocab_size)
        if "messages" in row:
            return self._encode_turns(row["messages"], 0, row.get("tools"))
        if "prompt" in row and "completion" in row:
            turns = [*row["prompt"], *row["completion"]]
            return self._encode_turns(turns, len(row["prompt"]), row.get("tools"))
        raise ValueError(
            f"a row with the keys {sorted(map(str, row))[:8]} has neither {self.column!r}, "
            "input_ids, messages nor prompt and completion: name the text's column with column="
        )

    def _encode_turns(self, turns: Any, first: int, tools: Any) -> Sample:
        sample = encode_chat(self._needed_tokenizer(), turns, first, _schemas(tools))
        return checked_sample(sample.tokens, sample.labels, self.vocab_size)

    def _check_end(self) -> None:
        if self._lacks_eos:
            raise ValueError(
                "the tokenizer has no eos token to end documents with: set its eos_token, "
                "or pass eos= an id, or eos=False to train without ends"
            )

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        if self.eos is not None and (not len(ids) or ids[-1] != self.eos):
            return np.append(ids, self.eos)
        return ids

    def _ids_of_all(self, texts: list[str], special: bool) -> list[np.ndarray | ValueError]:
        """Tokenize in one call; if that fails, one by one, to find out which text it was."""
        if not texts:
            return []
        try:
            tokenizer = self._needed_tokenizer()
            if not hasattr(tokenizer, "get_vocab"):
                return [self._guarded(text) for text in texts]
            batch = tokenizer(
                texts, add_special_tokens=special, return_attention_mask=False, verbose=False
            )
            return [np.asarray(ids, np.int64) for ids in batch["input_ids"]]
        except Exception as error:  # a tokenizer may raise anything on hostile text
            if len(texts) == 1:
                return [_as_value_error(error)]
            return [ids for text in texts for ids in self._ids_of_all([text], special)]

    def _guarded(self, text: str) -> np.ndarray | ValueError:
        try:
            return checked_ids(self.tokenizer(text), "the tokenizer's output")
        except Exception as error:  # a tokenizer may raise anything on hostile text
            return _as_value_error(error)

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("a row of text needs a tokenizer: pass tokenizer=")
        return self.tokenizer


def _eos_id(tokenizer: Any, eos: bool | int) -> int | None:
    if eos is False:
        return None
    if eos is not True:
        return int(eos)
    return getattr(tokenizer, "eos_token_id", None)


def _known_ids(tokenizer: Any) -> int | None:
    """Count the ids up to the largest: a vocabulary with gaps has fewer entries than that."""
    if hasattr(tokenizer, "get_vocab"):
        return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None


def _schemas(tools: Any) -> list | tuple | None:
    """Give a chat's tools, which many data sets store as JSON text: columns are of one type."""
    found = tools
    if isinstance(tools, str):
        try:
            found = json.loads(tools or "null")
        except json.JSONDecodeError:
            raise ValueError(f"tools must be a list of schemas, got {tools!r:.60}") from None
    if found is not None and not isinstance(found, list | tuple):
        raise ValueError(f"tools must be a list of schemas, got {type(found).__name__}")
    return found


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty: a document needs at least one token")
    return value


def _as_value_error(error: Exception) -> ValueError:
    return error if type(error) is ValueError else ValueError(f"{type(error).__name__}: {error}")
