"""Incremental detokenization, for streams and stop strings.

A token is not a whole number of characters: the bytes of one character may arrive in two tokens.
Text is therefore decoded from the newest few tokens, and its end is held back until the last
character is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 16
"""Tokens held back; longer runs that do not decode never will."""
_MAX_CHARACTER = 4
"""Bytes, and therefore tokens, of the longest character."""
CONTEXT_TOKENS = 4
"""Prompt tokens that the text of the first new token may depend on."""


class Detokenizer:
    """Text of a growing list of tokens; each token is decoded a bounded number of times."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-CONTEXT_TOKENS:])
        self._start = 0
        """First token that is decoded again, as context of the next ones."""
        self._end = len(self._tokens)
        """Tokens before this one are part of `text`."""
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._tokens.extend(tokens)
        old, new = self._decode_to(self._end), self._decode_to(None)
        end = len(self._tokens)
        if new.endswith(_INCOMPLETE) or not added_text(old, new):
            if end - self._end <= _MAX_PENDING:
                return ""
            end, new = self._last_boundary(new)
        return self._append(end, added_text(old, new))

    def flush(self) -> str:
        """Return the text held back, complete or not."""
        old = self._decode_to(self._end)
        return self._append(len(self._tokens), added_text(old, self._decode_to(None)))

    def _decode_to(self, end: int | None) -> str:
        return self._decode(self._tokens[self._start : end])

    def _append(self, end: int, text: str) -> str:
        self._start, self._end = self._end, end
        self.text += text
        return text

    def _last_boundary(self, text: str) -> tuple[int, str]:
        """Where to split bytes that do not decode: outside characters, where none may start."""
        last = len(self._tokens) - _MAX_CHARACTER
        ends = range(last, last - _MAX_PENDING + _MAX_CHARACTER, -1)
        prefixes = ((end, self._decode_to(end)) for end in ends)
        fallback = (last, self._decode_to(last))
        return next((prefix for prefix in prefixes if text.startswith(prefix[1])), fallback)


def added_text(before: str, after: str) -> str:
    """Return what more tokens added to a text, whose last character they may have completed.

    >>> added_text("a", "ab"), added_text("a\N{REPLACEMENT CHARACTER}", "a\N{EURO SIGN}b")
    ('b', '€b')
    """
    if not after.startswith(before):
        before = before.rstrip(_INCOMPLETE)
    return after[len(before) :]


def find_stop(text: str, num_new: int, stops: Sequence[str]) -> int | None:
    """Return where the first stop string starts that ends within the last `num_new` characters.

    >>> find_stop("one two\\n\\nthree", 7, ["\\n\\n", "three"])
    7
    >>> find_stop("one two", 7, ["\\n"]) is None
    True
    """
    starts = [text.find(s, max(0, len(text) - num_new - len(s) + 1)) for s in stops]
    return min((start for start in starts if start >= 0), default=None)
