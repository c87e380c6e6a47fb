"""Rows to samples: text, prompt and completion, chat messages, or ready token ids.

    {"text": ...}                     ids + eos                 every token but the first counts
    {"prompt": ..., "completion": ...} ids of both + eos        the completion counts
    {"messages": [...]}               the tokenizer's template  the assistant's turns count
    {"input_ids": [...], "labels"?}   as they are, checked      the labels say what counts

Text is tokenized in batches. A row that cannot be read becomes a ValueError in its place, so that
its neighbours are unharmed and whoever asked can raise it or leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .chat import encode_chat
from .ids import checked_ids, checked_sample
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
        known = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        self.vocab_size = vocab_size if vocab_size is not None else known

    def encode(self, rows: Sequence[Any]) -> list[Sample | ValueError]:
        """Give the sample of each row, or the reason why there is none."""
        out: list[Any] = [None] * len(rows)
        texts: dict[int, str] = {}
        for i, row in enumerate(rows):
            try:
                text = self._text_of(row)
                if text is None:
                    out[i] = self._encode_row(row)
                else:
                    texts[i] = text
            except Exception as error:  # a tokenizer or its template may raise anything
                out[i] = _as_value_error(error)
        for i, ids in zip(texts, self._ids_of_all(list(texts.values())), strict=True):
            out[i] = ids if isinstance(ids, ValueError) else self._ended(ids)
        return out

    def _text_of(self, row: Any) -> str | None:
        """Give the row's text if it is a text row."""
        if isinstance(row, str):
            return _text(row, "text")
        if isinstance(row, Mapping) and self.column in row:
            return _text(row[self.column], self.column)
        return None

    def _encode_row(self, row: Any) -> Sample:
        if isinstance(row, Sample):
            return checked_sample(row.tokens, row.labels, self.vocab_size)
        if isinstance(row, list | tuple | np.ndarray):
            return checked_sample(row, None, self.vocab_size)
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must be a dict, text or token ids, got {type(row).__name__}")
        if "input_ids" in row:
            return checked_sample(row["input_ids"], row.get("labels"), self.vocab_size)
        if "messages" in row:
            return encode_chat(self._needed_tokenizer(), row["messages"])
        if "prompt" in row and "completion" in row:
            return self._encode_completion(row["prompt"], row["completion"])
        raise ValueError(
            f"a row with the keys {sorted(map(str, row))[:8]} has neither {self.column!r}, "
            "input_ids, messages nor prompt and completion: name the text's column with column="
        )

    def _encode_completion(self, prompt: Any, completion: Any) -> Sample:
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            return encode_chat(self._needed_tokenizer(), [*prompt, *completion], first=len(prompt))
        before = self._ids(_text(prompt, "prompt"), special=True)
        if len(before) and before[-1] == self.eos:
            before = before[:-1]  # a tokenizer that ends every text must not end the prompt
        after = self._ids(_text(completion, "completion"), special=False)
        after = self._ended(after).tokens
        labels = np.concatenate([np.full(len(before), IGNORE), after])
        return Sample(np.concatenate([before, after]), labels)

    def _ended(self, ids: np.ndarray) -> Sample:
        if self.eos is not None and (not len(ids) or ids[-1] != self.eos):
            ids = np.append(ids, self.eos)
        return Sample(ids)

    def _ids_of_all(self, texts: list[str]) -> list[np.ndarray | ValueError]:
        """Tokenize in one call; if that fails, one by one, to find out which text it was."""
        if not texts:
            return []
        tokenizer = self._needed_tokenizer()
        if hasattr(tokenizer, "get_vocab"):
            try:
                batch = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
                return [np.asarray(ids, np.int64) for ids in batch]
            except Exception as error:  # a tokenizer may raise anything on hostile text
                if len(texts) == 1:
                    return [_as_value_error(error)]
                return [ids for text in texts for ids in self._ids_of_all([text])]
        return [self._guarded(text) for text in texts]

    def _guarded(self, text: str) -> np.ndarray | ValueError:
        try:
            return self._ids(text, special=True)
        except Exception as error:  # a tokenizer may raise anything on hostile text
            return _as_value_error(error)

    def _ids(self, text: str, special: bool) -> np.ndarray:
        tokenizer = self._needed_tokenizer()
        if not hasattr(tokenizer, "get_vocab"):
            return checked_ids(tokenizer(text), "the tokenizer's output")
        ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return np.asarray(ids, np.int64)

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


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty: a document needs at least one token")
    return value


def _as_value_error(error: Exception) -> ValueError:
    return error if type(error) is ValueError else ValueError(f"{type(error).__name__}: {error}")
