"""Rows to samples: text, prompt and completion, chat messages, or ready token ids.

    {"text": ...}                     ids + eos                 every token but the first counts
    {"prompt": ..., "completion": ...} ids of the whole + eos   the completion counts
    {"messages": [...], "tools"?}     the tokenizer's template  the assistant's turns count
    {"input_ids": [...], "labels"?}   as they are, checked      the labels say what counts

Text is tokenized in batches; a prompt and its completion as the one text they are, and a token
that holds something of both counts. A row that cannot be read becomes a ValueError in its place,
so that its neighbours are unharmed and whoever asked can raise it or leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..sample import IGNORE_INDEX, Sample
from ..token_ids import check_masks, checked_ids, checked_sample
from .chat import encode_chat


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
        texts: dict[int, str] = {}
        prompts: dict[int, str] = {}
        for i, row in enumerate(map(self._filled, rows)):
            try:
                found = self._texts_of(row)
                if found is None:
                    out[i] = self._encode_row(row)
                    continue
                texts[i] = "".join(found)
                if len(found) == 2:
                    prompts[i] = found[0]
            except Exception as error:  # a tokenizer or its template may raise anything
                out[i] = _as_value_error(error)
        if texts:
            self._check_end()
        all_ids = self._ids_of_all(list(texts.values()), ends=bool(prompts))
        for i, ids in zip(texts, all_ids, strict=True):
            try:
                out[i] = self._sample(ids, prompts.get(i))
            except ValueError as error:
                out[i] = error
        return out

    def _filled(self, row: Any) -> Any:
        """Leave null columns out, as tables with rows of several kinds have them."""
        if not isinstance(row, Mapping) or all(value is not None for value in row.values()):
            return row
        filled = {name: value for name, value in row.items() if value is not None}
        kinds = {self.column}, {"input_ids"}, {"messages"}, {"prompt", "completion"}
        return filled if any(kind <= filled.keys() for kind in kinds) else row

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
        return "" if pair[0] == "" else _text(pair[0], "prompt"), _text(pair[1], "completion")

    def _sample(self, found: _Ids | ValueError, prompt: str | None) -> Sample:
        """Build the sample of a text, which may begin with a prompt that does not count."""
        if isinstance(found, ValueError):
            raise found
        ids = self._ended(found.ids)
        if prompt is None:
            return checked_sample(ids, None, self.vocab_size)
        first = self._first_behind(prompt, found)
        after = checked_ids(ids[first:], "completion")
        labels = np.concatenate([np.full(first, IGNORE_INDEX), after])
        return checked_sample(ids, labels, self.vocab_size)

    def _first_behind(self, prompt: str, found: _Ids) -> int:
        """Find the first token of a text that reaches beyond the prompt it begins with."""
        if not prompt:
            return 0
        if found.ends is not None:
            beyond = found.ends > len(prompt)
            return int(np.argmax(beyond)) if beyond.any() else len(found.ids)
        (alone,) = self._ids_of_all([prompt])
        if isinstance(alone, ValueError):
            raise alone
        shorter = min(len(alone.ids), len(found.ids))
        differ = alone.ids[:shorter] != found.ids[:shorter]
        return int(np.argmax(differ)) if differ.any() else shorter

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
        known = self.vocab_size
        if self.eos is not None and known is not None and not 0 <= self.eos < known:
            raise ValueError(f"eos={self.eos}: the vocabulary has the ids from 0 to {known - 1}")

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        if self.eos is not None and (not len(ids) or ids[-1] != self.eos):
            return np.append(ids, self.eos)
        return ids

    def _ids_of_all(self, texts: list[str], ends: bool = False) -> list[_Ids | ValueError]:
        """Tokenize in one call; if that fails, one by one, to find out which text it was.

        ends: say where tokens end, if the tokenizer knows it.
        """
        if not texts:
            return []
        try:
            tokenizer = self._needed_tokenizer()
            if not hasattr(tokenizer, "get_vocab"):
                return [self._guarded(text) for text in texts]
            ends = ends and getattr(tokenizer, "is_fast", False)
            batch = tokenizer(
                texts, return_attention_mask=False, return_offsets_mapping=ends, verbose=False
            )
            places = batch["offset_mapping"] if ends else [None] * len(texts)
            return [_Ids.of(*both) for both in zip(batch["input_ids"], places, strict=True)]
        except Exception as error:  # a tokenizer may raise anything on hostile text
            if len(texts) == 1:
                return [_as_value_error(error)]
            return [ids for text in texts for ids in self._ids_of_all([text], ends)]

    def _guarded(self, text: str) -> _Ids | ValueError:
        try:
            return _Ids(checked_ids(self.tokenizer(text), "the tokenizer's output"))
        except Exception as error:  # a tokenizer may raise anything on hostile text
            return _as_value_error(error)

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("a row of text needs a tokenizer: pass tokenizer=")
        return self.tokenizer


class _Ids(NamedTuple):
    """The tokens of one text."""

    ids: np.ndarray
    ends: np.ndarray | None = None
    """The character behind each token; 0 for such as stand for none."""

    @classmethod
    def of(cls, ids: list[int], places: list[tuple[int, int]] | None) -> _Ids:
        ends = None if places is None else np.array([end for _, end in places], np.int64)
        return cls(np.asarray(ids, np.int64), ends)


def _eos_id(tokenizer: Any, eos: bool | int) -> int | None:
    if eos is False:
        return None
    if eos is True:
        return getattr(tokenizer, "eos_token_id", None)
    if not isinstance(eos, int | np.integer):
        raise ValueError(f"eos={eos!r}: True for the tokenizer's own, an id, or False for none")
    return int(eos)


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
