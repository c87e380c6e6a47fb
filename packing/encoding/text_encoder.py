"""Texts to flat arrays of ids, without Python objects per token, by the fastest exact encoder.

    fastokens, if installed ─▶ tokenizers' encode_batch_fast ─▶ the tokenizer itself
             └ compared with the tokenizer's ids: on hard cases and on the first texts of the data

An encoder whose ids differ, or that cannot load the tokenizer, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
                f"{self.library} encodes {text[:60]!r}... otherwise than the tokenizer: uninstall "
                f"{self.library}, and tokenize again into another folder"
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
            reasons.append(f"{library} is not installed, which would be faster")
        except Exception as error:  # libraries raise their own errors on tokenizers they lack
            reason = " ".join(str(error).split())[:80]
            reasons.append(f"{library} cannot load the tokenizer ({reason})")
    return None, "; ".join([*reasons, "encoding with the tokenizer itself"])
