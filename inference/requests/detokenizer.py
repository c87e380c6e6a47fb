"""Where a text ends: stop strings, found also across the borders of tokens.

Tokens do not split text at characters: the bytes of one letter may come in two of them. So text is
decoded from a window of the newest tokens, and what still may grow into another character is held
back until it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_HELD = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 16
"""Tokens; where more are no text, they never become it."""
_CHARACTER = 4
"""Bytes, so tokens at most, of the longest character."""


class Detokenizer:
    """Text of a growing list of tokens, each token decoded a bounded number of times."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-4:])
        self._start = 0
        self._read = len(self._tokens)
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that is settled by them."""
        self._tokens.extend(tokens)
        before, now = self._window(self._read), self._window()
        end = len(self._tokens)
        if now.endswith(_HELD) or len(now) <= len(before):
            if end - self._read <= _MOST_HELD:
                return ""
            end, now = self._border(now)
        return self._settle(end, now[len(before) :])

    def flush(self) -> str:
        """Return what was held back, as it is."""
        before = self._window(self._read)
        return self._settle(len(self._tokens), self._window()[len(before) :])

    def _window(self, end: int | None = None) -> str:
        return self._decode(self._tokens[self._start : end])

    def _settle(self, end: int, new: str) -> str:
        self._start, self._read = self._read, end
        self.text += new
        return new

    def _border(self, now: str) -> tuple[int, str]:
        """Where to cut bytes that are no text: not within a character, nor where one may begin."""
        last = len(self._tokens) - _CHARACTER
        ends = range(last, last - _MOST_HELD + _CHARACTER, -1)
        said = ((end, self._window(end)) for end in ends)
        return next((cut for cut in said if now.startswith(cut[1])), (last, self._window(last)))


def find_stop(text: str, new: int, stops: Sequence[str]) -> int | None:
    """Find where the first stop string begins that ends within the last `new` characters.

    >>> find_stop("one two\\n\\nthree", 7, ["\\n\\n", "three"])
    7
    >>> find_stop("one two", 7, ["\\n"]) is None
    True
    """
    places = [text.find(s, max(0, len(text) - new - len(s) + 1)) for s in stops]
    return min((p for p in places if p >= 0), default=None)
