"""What a user sees while data is prepared: rows encoded so far, and that the packer is compiled.

    encoding corpus.jsonl: 41%|████      | 82.9k/200k [00:33<00:47, 2.49k rows/s]        terminal
    nopad: encoding corpus.jsonl: 82,900 of about 200,000 rows, 2,490 rows/s, 47 s left  log file

Only the first rank says it. What takes less than a few seconds is not shown.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event
from tqdm import tqdm

SHOWN_AFTER = 2
"""Seconds after which a terminal shows the bar."""
LINE_INTERVAL = 30
"""Seconds between two lines where there is no terminal."""


class RowProgress:
    """Shows how many rows of a source were encoded.

    Args:
        name: of the source.
        num_rows: rows of the source, if known.
        num_bytes: its size otherwise; the number of rows is estimated from those read.
    """

    def __init__(self, name: str, num_rows: int | None, num_bytes: int | None):
        self.name, self.num_rows, self.num_bytes = name, num_rows, num_bytes
        self.rows = self.bytes = 0
        self._start = self._last_line = time.monotonic()
        is_shown = _is_first_rank() and sys.stderr.isatty()
        self._bar = tqdm(
            total=num_rows, desc=f"encoding {name}", unit=" rows", unit_scale=True, leave=False,
            delay=SHOWN_AFTER, dynamic_ncols=True, disable=not is_shown,
        )  # fmt: skip

    def add(self, rows: list[Any]) -> None:
        """Count encoded rows."""
        self.rows += len(rows)
        if self.num_rows is None and self.num_bytes is not None:
            self.bytes += sum(len(str(row)) + 1 for row in rows)
            self._bar.total = self.total()
        self._bar.update(len(rows))
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            _say(self.line(now - self._start))

    def total(self) -> int | None:
        """Return the rows of the source, estimated if its size is known only in bytes."""
        if self.num_rows is not None or not self.bytes:
            return self.num_rows
        return max(self.rows, round(self.rows * (self.num_bytes or 0) / self.bytes))

    def line(self, seconds: float) -> str:
        """Say what was done in these seconds.

        >>> progress = RowProgress("a.jsonl", num_rows=400, num_bytes=None)
        >>> progress.add([{"text": "x"}] * 100)
        >>> progress.line(seconds=2.0)
        'encoding a.jsonl: 100 of about 400 rows, 50 rows/s, 6 s left'
        """
        rate, total = self.rows / max(seconds, 1e-9), self.total()
        text = f"encoding {self.name}: {self.rows:,}"
        if total is None:
            return f"{text} rows, {rate:,.0f} rows/s"
        left = (total - self.rows) / rate
        return f"{text} of about {total:,} rows, {rate:,.0f} rows/s, {left:,.0f} s left"

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def announce_compilation(dispatcher: Any, what: str) -> Iterator[None]:
    """Say in one line if numba compiles this function inside the block: it takes half a minute."""
    with event.install_listener("numba:compile", _Announcement(dispatcher, what)):
        yield


class _Announcement(event.Listener):
    def __init__(self, dispatcher: Any, what: str):
        self.dispatcher, self.what = dispatcher, what

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is not self.dispatcher:
            return
        folder = self.dispatcher.stats.cache_path
        kept = f"kept in {folder}" if folder else "set NUMBA_CACHE_DIR to keep it"
        _say(f"compiling {self.what} (about half a minute, at the first start only; {kept})")

    def on_end(self, event: Any) -> None:
        pass


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(message: str) -> None:
    if _is_first_rank():
        tqdm.write(f"nopad: {message}", file=sys.stderr)
