"""Rows to samples: text, prompt and completion, chat messages, or ready token ids.

    {"text": ...}                      ids + eos                 labels: every token but the first
    {"prompt": ..., "completion": ...} ids of the full text + eos         the completion
    {"messages": [...], "tools"?}      the tokenizer's template           the assistant's turns
    {"input_ids": [...], "labels"?}    validated                          the labels

Text is tokenized in batches. A prompt and its completion are tokenized as one text, and a token
that contains parts of both is a label. A row that cannot be read becomes a ValueError in its
position, so that other rows are unaffected; it is raised or, with on_error="skip", counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ..argument_checks import check_counts
from ..document_starts import check_not_packed
from ..planning.overflow import too_long_error
from ..sample import IGNORE_INDEX, Sample
from ..sources.source import TEXT_COLUMN, Row, RowError
from ..state.fingerprint import processor_settings, tokenizer_fingerprint
from ..token_ids import LOSS_MASKS, check_masks, make_sample, refuse_images, validate_token_ids
from .chat import encode_chat
from .report import SkippedRows
from .row_format import RowFormat, format_name, row_format, suggest_format


class Encoder:
    """Turns rows into samples with one tokenizer.

    >>> encoder = Encoder(lambda text: [ord(letter) for letter in text], add_eos=0)
    >>> encoder.encode([{"text": "ab"}])[0].tokens.tolist()
    [97, 98, 0]
    >>> encoder.encode([{"prompt": "a", "completion": "b"}])[0].labels.tolist()
    [-100, 98, 0]
    """

    label_column: str | None = None  # LabelledEncoder has one
    processor: Any = None  # ImageEncoder has one
    tokens_suffice = True  # samples of these two have more

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        text_column: str = TEXT_COLUMN,
        add_eos: bool | int = True,
        vocab_size: int | None = None,
        format: RowFormat | None = None,
    ):
        """Choose how rows are read.

        tokenizer: a Hugging Face tokenizer, or any function from text to ids.
        text_column: the key of the text in a row.
        add_eos: end documents with the tokenizer's eos (True), with this id, or not (False).
        format: layout of the rows, "alpaca" or "sharegpt", or a function that converts a row.
        """
        _check_tokenizer(tokenizer)
        if not isinstance(text_column, str):
            raise ValueError(f"text_column={text_column!r}: pass the name of a column")
        self.tokenizer = tokenizer
        self.text_column = text_column
        self.format = None if format is None else row_format(format)
        self.format_name = None if format is None else format_name(format)
        self.format_is_named = not callable(format)
        """Whether the format has a name; False for a user's function."""
        self.eos_token_id = _eos_token_id(tokenizer, add_eos)
        self.eos_is_given = not isinstance(add_eos, bool | np.bool_)
        """Whether the user passed the id itself."""
        missing = add_eos is True and self.eos_token_id is None
        self.lacks_eos = missing and hasattr(tokenizer, "get_vocab")
        (vocab_size,) = check_counts(vocab_size=vocab_size)
        self.vocab_size = _vocab_size(tokenizer) if vocab_size is None else vocab_size
        self.used_template = False
        """Whether a chat was encoded."""
        self.text_encoder: Any = None
        """Encodes plain texts faster (`text_encoder.py`), if it was found to be exact."""

    def encode(self, rows: Sequence[Any]) -> list[Sample | ValueError]:
        """Return the sample of each row, or the error if it has none."""
        results: list[Any] = [None] * len(rows)
        texts: dict[int, str] = {}
        prompts: dict[int, str] = {}
        for i, row in enumerate(map(self._without_nulls, rows)):
            try:
                row = row if self.format is None else self.format(row)
                parts = self._text_parts(row)
                if parts is None:
                    results[i] = self._encode_row(row)
                    continue
                texts[i] = "".join(parts)
                if len(parts) == 2:
                    prompts[i] = parts[0]
            except Exception as error:  # a tokenizer or its template may raise anything
                results[i] = as_value_error(error)
        if texts:
            self._check_eos()
        tokenized = self._tokenize(list(texts.values()), with_ends=bool(prompts))
        for i, tokens in zip(texts, tokenized, strict=True):
            try:
                results[i] = self._text_sample(tokens, prompts.get(i))
            except ValueError as error:
                results[i] = error
        return results

    def _without_nulls(self, row: Any) -> Any:
        """Remove null columns, which tables with several kinds of rows have."""
        if not isinstance(row, Mapping) or all(value is not None for value in row.values()):
            return row
        filled = {name: value for name, value in row.items() if value is not None}
        known = {self.text_column}, {"input_ids"}, {"messages"}, {"prompt", "completion"}
        return filled if any(columns <= filled.keys() for columns in known) else row

    def _text_parts(self, row: Any) -> tuple[str, ...] | None:
        """Return the row's text, or its prompt and completion; None for other rows."""
        if isinstance(row, str):
            return (_check_text(row, TEXT_COLUMN),)
        if not isinstance(row, Mapping) or "input_ids" in row:
            return None
        self._check_columns(row)
        if "messages" in row:
            return None
        if self.text_column in row:
            return (_check_text(row[self.text_column], self.text_column),)
        pair = [row.get(name) for name in ("prompt", "completion")]
        if "prompt" not in row or "completion" not in row or any(isinstance(p, list) for p in pair):
            return None
        prompt = "" if pair[0] == "" else _check_text(pair[0], "prompt")
        return prompt, _check_text(pair[1], "completion")

    def _check_columns(self, row: Mapping) -> None:
        """Raise if several columns of a row without token ids say what to train on."""
        refuse_images(row)
        forms = dict.fromkeys([(self.text_column,), ("messages",), ("prompt", "completion")])
        if self.text_column in ("prompt", "completion"):  # the user chose one of the two
            del forms["prompt", "completion"]
        found = [form for form in forms if all(name in row for name in form)]
        if len(found) > 1:
            names = " and ".join("/".join(form) for form in found)
            raise ValueError(
                f"the row has {names}, but only one can be trained on: remove the others, or name "
                "another text column with text_column="
            )
        if not LOSS_MASKS.isdisjoint(row.keys()):
            name = min(LOSS_MASKS & row.keys())
            raise ValueError(
                f"{name} applies to token ids, but the row has none: pass input_ids and labels, or "
                "remove the column"
            )

    def _text_sample(self, tokens: _Tokens | ValueError, prompt: str | None) -> Sample:
        """Build the sample of a text; the tokens of a prompt at its beginning are not labels."""
        if isinstance(tokens, ValueError):
            raise tokens
        ids = self._append_eos(tokens.ids)
        if prompt is None:
            return make_sample(ids, None, self.vocab_size)
        first = self._first_after(prompt, tokens)
        completion = validate_token_ids(ids[first:], "completion")
        labels = np.concatenate([np.full(first, IGNORE_INDEX), completion])
        return make_sample(ids, labels, self.vocab_size)

    def _first_after(self, prompt: str, tokens: _Tokens) -> int:
        """Find the first token of a text that extends beyond the prompt at its beginning."""
        if not prompt:
            return 0
        if tokens.ends is not None:
            beyond = tokens.ends > len(prompt)
            return int(np.argmax(beyond)) if beyond.any() else len(tokens.ids)
        (alone,) = self._tokenize([prompt])
        if isinstance(alone, ValueError):
            raise alone
        shorter = min(len(alone.ids), len(tokens.ids))
        differ = alone.ids[:shorter] != tokens.ids[:shorter]
        return int(np.argmax(differ)) if differ.any() else shorter

    def _encode_row(self, row: Any) -> Sample:
        if isinstance(row, Sample):
            sample = make_sample(row.tokens, row.labels, self.vocab_size)
            return replace(sample, target=row.target, images=row.images)
        if isinstance(row, list | tuple) or hasattr(row, "__array__"):
            return make_sample(row, None, self.vocab_size)
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must be a dict, text or token ids, got {type(row).__name__}")
        if "input_ids" in row:
            refuse_images(row)
            check_masks(row)
            sample = make_sample(row["input_ids"], row.get("labels"), self.vocab_size)
            check_not_packed(row, len(sample))
            return sample
        if "messages" in row:
            return self._encode_messages(row["messages"], 0, row.get("tools"))
        if "prompt" in row and "completion" in row:
            messages = [*row["prompt"], *row["completion"]]
            return self._encode_messages(messages, len(row["prompt"]), row.get("tools"))
        raise ValueError(
            f"a row with the keys {sorted(map(str, row))[:8]} has neither {self.text_column!r}, "
            f"input_ids, messages nor prompt and completion: {suggest_format(row)}"
        )

    def _encode_messages(self, messages: Any, first: int, tools: Any) -> Sample:
        self.used_template = True
        sample = encode_chat(self._require_tokenizer(), messages, first, tools)
        return make_sample(sample.tokens, sample.labels, self.vocab_size)

    def _check_eos(self) -> None:
        if self.lacks_eos:
            raise ValueError(
                "the tokenizer has no eos token to end documents with: set its eos_token, "
                "or pass add_eos=ID, or add_eos=False to train without end tokens"
            )
        eos, size = self.eos_token_id, self.vocab_size
        if eos is not None and size is not None and not 0 <= eos < size:
            raise ValueError(f"add_eos={eos}: the vocabulary has the ids from 0 to {size - 1}")

    def _append_eos(self, ids: np.ndarray) -> np.ndarray:
        if self.eos_token_id is not None and (not len(ids) or ids[-1] != self.eos_token_id):
            return np.append(ids, self.eos_token_id)
        return ids

    def _tokenize(self, texts: list[str], with_ends: bool = False) -> list[_Tokens | ValueError]:
        """Tokenize in one call; if that fails, one by one, to find the text that failed.

        with_ends: also return the character after each token, if the tokenizer knows it.
        """
        if not texts:
            return []
        try:
            tokenizer = self._require_tokenizer()
            if not hasattr(tokenizer, "get_vocab"):
                return [self._tokenize_or_error(text) for text in texts]
            with_ends = with_ends and getattr(tokenizer, "is_fast", False)
            batch = tokenizer(
                texts, return_attention_mask=False, return_offsets_mapping=with_ends, verbose=False
            )
            offsets = batch["offset_mapping"] if with_ends else [None] * len(texts)
            return [_Tokens.of(*both) for both in zip(batch["input_ids"], offsets, strict=True)]
        except Exception as error:  # a tokenizer may raise anything on hostile text
            if len(texts) == 1 and any("\ud800" <= letter <= "\udfff" for letter in texts[0]):
                return [ValueError("the text has a surrogate, half a character: remove it")]
            if len(texts) == 1:
                return [as_value_error(error)]
            return [tokens for text in texts for tokens in self._tokenize([text], with_ends)]

    def _tokenize_or_error(self, text: str) -> _Tokens | ValueError:
        try:
            return _Tokens(validate_token_ids(self.tokenizer(text), "the tokenizer's output"))
        except Exception as error:  # a tokenizer may raise anything on hostile text
            return as_value_error(error)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("a row of text needs a tokenizer: pass tokenizer=")
        return self.tokenizer


class _Tokens(NamedTuple):
    """The tokens of one text."""

    ids: np.ndarray
    ends: np.ndarray | None = None
    """The character after each token; 0 for tokens without characters."""

    @classmethod
    def of(cls, ids: list[int], offsets: list[tuple[int, int]] | None) -> _Tokens:
        ends = None if offsets is None else np.array([end for _, end in offsets], np.int64)
        return cls(np.asarray(ids, np.int64), ends)


def _check_tokenizer(tokenizer: Any) -> None:
    if isinstance(tokenizer, str | PathLike):
        name = str(tokenizer)
        raise ValueError(
            f"tokenizer={name!r} is a name: pass AutoTokenizer.from_pretrained({name!r})"
        )
    if hasattr(tokenizer, "image_processor"):
        raise ValueError("a processor cannot encode a corpus of tokens: pass processor.tokenizer")
    if tokenizer is not None and not callable(tokenizer):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}: pass a Hugging Face tokenizer, or a "
            "function from text to ids"
        )


def _eos_token_id(tokenizer: Any, add_eos: bool | int) -> int | None:
    if add_eos is False:
        return None
    if add_eos is True:
        return getattr(tokenizer, "eos_token_id", None)
    if not isinstance(add_eos, int | np.integer) or not 0 <= add_eos < 2**31:
        raise ValueError(
            f"add_eos={add_eos!r}: pass True for the tokenizer's eos, an id, or False for none"
        )
    return int(add_eos)


def _vocab_size(tokenizer: Any) -> int | None:
    """Return the largest id plus 1: a vocabulary with gaps has fewer entries than that."""
    if hasattr(tokenizer, "get_vocab"):
        return max(tokenizer.get_vocab().values(), default=-1) + 1 or None
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} is empty: a document needs at least one token")
    return value


def as_value_error(error: Exception) -> ValueError:
    return error if type(error) is ValueError else ValueError(f"{type(error).__name__}: {error}")


def encoded_settings(encoder: Encoder) -> dict[str, Any]:
    """Return the settings that determine the samples of rows, as a state has them."""
    return {
        "text_column": encoder.text_column,
        "format": encoder.format_name,
        "add_eos": encoder.eos_token_id,
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        **({"label_column": encoder.label_column} if encoder.label_column else {}),
        **processor_settings(encoder.processor),
    }


ENCODE_BATCH = 256
"""Rows encoded per call of the tokenizer."""


def encode_rows(
    rows: Sequence[Row], encoder: Encoder, max_length: int | None = None, source: int = 0
) -> list[Sample | RowError]:
    """Return the sample of each row, or the error if it has none.

    max_length: a longer sample raises, even if bad rows are skipped.
    """
    readable = [row.value for row in rows if not isinstance(row.value, ValueError)]
    samples, results = iter(encoder.encode(readable)), []
    for row in rows:
        result = row.value if isinstance(row.value, ValueError) else next(samples)
        if not isinstance(result, Sample):
            results.append(RowError(row.location, result))
            continue
        if max_length is not None and len(result) > max_length:
            raise too_long_error(row.location, len(result), max_length)
        results.append(replace(result, source=source) if source else result)
    return results


def raise_or_skip(
    results: Iterable[Sample | RowError], skipped: SkippedRows | None
) -> Iterator[Sample]:
    """Yield the samples; count the errors in `skipped`, or raise the first if that is None."""
    for result in results:
        if isinstance(result, Sample):
            yield result
        elif skipped is None:
            raise result
        else:
            skipped.add(result)
