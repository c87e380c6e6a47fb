"""Text for a terminal: control characters of data are shown, not obeyed."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that reverse text, and half characters."""


def printable(text: object) -> str:
    """Write control characters as JSON does, so that data cannot move the cursor or more.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\\u001b[2J
    """
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))
