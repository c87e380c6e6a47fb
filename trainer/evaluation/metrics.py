"""What a completion is worth: a metric takes its text and the reference, and gives a number."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Metric = Callable[[str, Any], float]


def exact_match(text: str, reference: Any) -> float:
    """Give 1 where the text is the reference, spaces around them aside.

    >>> exact_match(" Paris\\n", "Paris"), exact_match("Paris.", "Paris")
    (1.0, 0.0)
    """
    return float(text.strip() == str(reference).strip())


def contains(text: str, reference: Any) -> float:
    """Give 1 where the reference occurs in the text.

    >>> contains("It is Paris.", "Paris")
    1.0
    """
    return float(str(reference).strip() in text)


def extracted(pattern: str, *, last: bool = True) -> Metric:
    """Compare what a regular expression finds in the text with what it finds in the reference.

    The first group counts, if there is one; commas in numbers do not. A reference in which the
    pattern does not occur is taken whole.

    last: the last find counts, else the first.

    >>> metric = extracted(r"#### (-?[0-9.,]+)")
    >>> metric("so 6 * 200 = 1200\\n#### 1,200", "#### 1200"), metric("1200", "#### 1200")
    (1.0, 0.0)
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None

    def metric(text: str, reference: Any) -> float:
        wanted = find(str(reference))
        return float(find(text) == (_plain(str(reference)) if wanted is None else wanted))

    def find(text: str) -> str | None:
        found = [m.group(1 if compiled.groups else 0) for m in compiled.finditer(text)]
        return _plain(found[-1 if last else 0] or "") if found else None

    metric.__name__ = "extracted"
    return metric


def _plain(answer: str) -> str:
    """Strip an answer to what is compared.

    >>> _plain(" 1,200. ")
    '1200'
    """
    return answer.strip().rstrip(".").replace(",", "")
