"""Parse a line of JSON as a row, more strictly than other readers.

Refused are keys that appear twice, NaN and Infinity, deep nesting, and a list of rows in one line.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any

DEPTH_LIMIT = 64
ONE_PER_LINE = "write one entry of the list per line"
ENDS_EARLY = "the line ends before the value: it is truncated, or the value has several lines"


def parse_row(line: bytes | ValueError) -> Any:
    """Return the value of a line, or the error that says why it has none.

    >>> parse_row(b'{"text": "a"}'), str(parse_row(b'{"text": "a", "text": "b"}'))
    ({'text': 'a'}, "not JSON: the key 'text' appears twice")
    """
    if isinstance(line, ValueError):
        return line
    try:
        # Some editors write a byte order mark; the utf-8-sig codec would cost 5 µs per line.
        row = _DECODER.decode(line.removeprefix(BOM_UTF8).decode("utf-8").rstrip())
    except RecursionError:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    except UnicodeDecodeError as error:
        return ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        ends_early = error.pos == len(error.doc) or error.msg.startswith("Unterminated string")
        hint = f"; {ENDS_EARLY}" if ends_early else ""
        hint = f"; {ONE_PER_LINE}" if line.strip() == b"[" else hint
        return ValueError(f"not JSON: {error}{hint}")
    except ValueError as error:
        return ValueError(f"not JSON: {error}")
    if isinstance(row, list) and row and isinstance(row[0], dict | str):
        return ValueError(f"the line is a list of {len(row)} entries; {ONE_PER_LINE}")
    if line.count(b"[") + line.count(b"{") > DEPTH_LIMIT and _depth(row) > DEPTH_LIMIT:
        return ValueError(f"JSON is nested deeper than {DEPTH_LIMIT}")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {duplicate!r} appears twice")
    return row


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _depth(row: Any) -> int:
    """Count the levels of nested lists and dicts."""
    level, depth = [row], 0
    while containers := [value for value in level if isinstance(value, list | dict)]:
        level = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
        depth += 1
    return depth


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
