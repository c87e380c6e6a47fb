"""Metrics of a completion and its reference: exact match, contains, regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Metric = Callable[[str, Any], float]


def exact_match(text: str, reference: Any) -> float:
    """Return 1 if the `text` equals the `reference`, ignoring surrounding whitespace.

    >>> exact_match(" Paris\\n", "Paris"), exact_match("Paris.", "Paris")
    (1.0, 0.0)
    """
    return float(text.strip() == str(reference).strip())


def contains(text: str, reference: Any) -> float:
    """Return 1 if the `reference` occurs in the `text`.

    >>> contains("It is Paris.", "Paris")
    1.0
    """
    return float(str(reference).strip() in text)


def regex_match(pattern: str, *, last: bool = True) -> Metric:
    """Compare the match of a regular expression in the text with its match in the reference.

    The first group is compared if there is one; commas in numbers are ignored. A reference without
    a match is compared as a whole.

    Args:
        pattern: the regular expression.
        last: compare the last match in a text; otherwise the first.

    >>> metric = regex_match(r"#### (-?[0-9.,]+)")
    >>> metric("so 6 * 200 = 1200\\n#### 1,200", "#### 1200"), metric("1200", "#### 1200")
    (1.0, 0.0)
    """
    try:
        regex = re.compile(pattern)
        regex.search("")  # bytes do not match text
    except (re.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None

    def metric(text: str, reference: Any) -> float:
        expected = find(str(reference))
        return float(find(text) == (_normalize(str(reference)) if expected is None else expected))

    def find(text: str) -> str | None:
        matches = [m.group(1 if regex.groups else 0) for m in regex.finditer(text)]
        return _normalize(matches[-1 if last else 0] or "") if matches else None

    metric.__name__ = "regex_match"
    return metric


def _normalize(answer: str) -> str:
    """Strip whitespace, a final period and commas.

    >>> _normalize(" 1,200. ")
    '1200'
    """
    return answer.strip().rstrip(".").replace(",", "")
