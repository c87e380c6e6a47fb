"""Encode plain texts as flat arrays of ids, by the fastest library whose ids are the tokenizer's.

    fastokens, if installed ─▶ tokenizers' encode_batch_fast ─▶ the tokenizer itself
             └ compared with the tokenizer's ids: on hard cases and on the first texts of the data

An encoder whose ids differ, or that cannot load the tokenizer, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..token_ids import LOSS_MASKS, MAX_TOKEN_ID
from .encoder import Encoder

SPECIAL_COLUMNS = LOSS_MASKS | {"input_ids", "messages", "prompt", "completion"}
"""Columns of a row that is not, or not only, plain text."""
CHECKED_BYTES = 2 << 20
"""Bytes of the data that an encoder is compared on."""
FEW_TEXTS = 8
"""Of the data, for another call of the tokenizer's own library."""
CHECKED_LETTERS = 2000
"""Of the first text of every shard."""
HARD_CASES = (
    "", " ", "  leading", "trailing  ", "\n\n\n", "\t\ttabs\r\nlines\r\r\n", "don't I'll WE'VE",
    "it’s 's'S's", "naïve café e\u0301 ﬁ Å Ａ", "日本語のテキスト。中文 한국어", "שלום مرحبا ไทย",
    "नमस्ते", "👩\u200d👩\u200d👧 🇩🇪 ☕\ufe0f", "0123456789 1,234,567.89 1e-10 0xFF", "１２３ ⅷ ½",
    "x = {'a': [1, 2]}\n    return x\n", "a" * 300, "=" * 99, " " * 257, "\x00\x01\x1f\x7f\x85",
    "\u00a0\u2003\u200b\ufeff", "<s></s><unk><pad><|endoftext|>", "<|im_start|>user\n<|im_end|>",
    "<think>", "[INST] [/INST] <<SYS>>", "https://a.b/c?d=e&f=%20#g", "\U0010ffff\ufffd",
    "ßẞ ſ K Å İı", "Zażółć gęślą jaźń", "a\u0300\u0301\u0302b",
)  # fmt: skip
"""Texts on which tokenizers with other rules differ."""


class TextEncoder:
    """Encodes batches of texts with one tokenizer."""

    def __init__(self, tokenizer: Any, library: str):
        self.tokenizer, self.library = tokenizer, library
        self._split = bool(getattr(tokenizer, "split_special_tokens", False))
        self._loaded = self._load()

    def _load(self) -> Any:
        backend = self.tokenizer.backend_tokenizer
        if self.library != "fastokens":
            return backend
        import fastokens

        loaded = fastokens.Tokenizer.from_json_str(backend.to_str())
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts in one array, and the number of each."""
        if self.library == "fastokens":
            ids, offsets = self._loaded.encode_batch_flat(texts, True, self._split)
            lengths = np.diff(np.frombuffer(offsets, np.uint64).astype(np.int64))
            return np.frombuffer(ids, np.uint32), lengths
        encoded = [each.ids for each in self._loaded.encode_batch_fast(texts)]
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        return np.concatenate([np.array(ids, np.uint32) for ids in encoded]), lengths

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text; starts no threads, which a fork would lose."""
        if self.library == "fastokens":
            encoded = self._loaded.encode(text, True, self._split)
            return list(getattr(encoded, "ids", encoded))
        return self._loaded.encode(text).ids

    def is_exact(self, texts: Iterable[str]) -> bool:
        """Return whether the ids are those of the tokenizer."""
        for text in texts:
            wanted = self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
            if self.encode(text) != wanted:
                return False
        return True

    def check_first(self, text: str) -> None:
        """Raise if the beginning of a text has other ids than the tokenizer's."""
        if not self.is_exact([text[:CHECKED_LETTERS]]):
            raise ValueError(
                f"{self.library} encodes {text[:60]!r}... differently than the tokenizer: "
                f"uninstall {self.library}, and tokenize again into another folder"
            )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_loaded": None}  # a library's object cannot be sent

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._loaded = self._load()


LIBRARIES = ("fastokens", "tokenizers")


def choose_encoder(
    tokenizer: Any, texts: list[str], libraries: Sequence[str] = LIBRARIES
) -> tuple[TextEncoder | None, str]:
    """Return the fastest exact encoder for a tokenizer, None if there is none, and a line on it.

    texts: the first texts of the data.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None, "the tokenizer is not a fast one of Transformers"
    reasons = []
    for library in libraries:
        try:
            encoder = TextEncoder(tokenizer, library)
            compared = texts if library == "fastokens" else texts[:FEW_TEXTS]
            if encoder.is_exact((*HARD_CASES, *compared)):
                return encoder, "; ".join([*reasons, f"encoding with {library}"])
            reasons.append(f"{library} gives other ids")
        except ImportError:
            install = f'pip install "nopad[{library}]"'
            reasons.append(f"{library} would be faster, but is not installed ({install})")
        except Exception as error:  # libraries raise their own errors on tokenizers they lack
            reason = " ".join(str(error).split())[:80]
            reasons.append(f"{library} cannot load the tokenizer ({reason})")
    return None, "; ".join([*reasons, "encoding with the tokenizer itself"])


def encode_texts(
    encoder: Encoder, rows: Sequence[Any], check: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the ids and lengths of rows that are all plain text, as `encoder.encode` would.

    None: encode them one by one, because a row is of another kind or bad, or nothing is faster.
    check: compare the first ids with the tokenizer's.
    """
    faster: TextEncoder | None = encoder.text_encoder
    if faster is None or encoder.format is not None or encoder.lacks_eos:
        return None
    texts = [text for row in rows if (text := plain_text(encoder, row)) is not None]
    if len(texts) < len(rows):
        return None
    if check:
        faster.check_first(texts[0])
    try:
        ids, lengths = faster.encode_batch(texts)
    except Exception:  # a tokenizer may raise anything on hostile text: `encode` names it
        return None
    if not _in_vocabulary(encoder, ids):
        return None
    if encoder.eos_token_id is not None:
        ids, lengths = _end_documents(ids, lengths, encoder.eos_token_id)
    return (ids, lengths) if lengths.all() else None


def plain_text(encoder: Encoder, row: Any) -> str | None:
    """Return the text of a row that has nothing else to train on; None for other rows."""
    if isinstance(row, Mapping):
        if not SPECIAL_COLUMNS.isdisjoint(row.keys() - {encoder.text_column}):
            return None
        row = row.get(encoder.text_column)
    return row if isinstance(row, str) and row else None


def _in_vocabulary(encoder: Encoder, ids: np.ndarray) -> bool:
    size, largest = encoder.vocab_size, max(int(ids.max(initial=0)), encoder.eos_token_id or 0)
    return largest <= MAX_TOKEN_ID and (size is None or largest < size)


def _end_documents(ids: np.ndarray, lengths: np.ndarray, eos: int) -> tuple[np.ndarray, np.ndarray]:
    """Append the eos to each document that does not end with it.

    >>> _end_documents(np.array([5, 6, 0, 7]), np.array([1, 2, 1]), 0)
    (array([5, 0, 6, 0, 7, 0]), array([2, 2, 2]))
    """
    ends = np.cumsum(lengths)
    open_ended = (lengths == 0) | (np.append(ids, 0)[ends - 1] != eos)
    return np.insert(ids, ends[open_ended], eos), lengths + open_ended
