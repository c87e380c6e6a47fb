"""Progress messages while data is prepared: rows encoded, and compilation of the packer.

    encoding corpus.jsonl: 41%|████      | 82.9k/200k [00:33<00:47, 2.49k rows/s]        terminal
    nopad: encoding corpus.jsonl: 82,900 of about 200,000 rows, 2,490 rows/s, 47 s left  log file

Only the first rank prints them, and only for work that takes more than a few seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numba.core import event
from tqdm import tqdm

if TYPE_CHECKING:
    from .sources.source import RowSource

SHOWN_AFTER = 2
"""Seconds after which a terminal shows the bar."""
LINE_INTERVAL = 30
"""Seconds between two lines where there is no terminal."""


class RowProgress:
    """Shows how many rows of a source were encoded.

    If the source knows only its size in bytes, its rows are estimated from those encoded.
    """

    def __init__(self, source: RowSource):
        self.source, self.num_rows = source, source.num_rows()
        self.rows = self.bytes = 0
        self._start = self._last_line = time.monotonic()
        is_shown = _is_first_rank() and sys.stderr.isatty()
        self._bar = tqdm(
            total=self.num_rows, desc=f"encoding {source.name}", unit=" rows", unit_scale=True,
            leave=False, delay=SHOWN_AFTER, dynamic_ncols=True, disable=not is_shown,
        )  # fmt: skip

    def add(self, rows: list[Any]) -> None:
        """Count encoded rows."""
        self.rows += len(rows)
        if self.num_rows is None and self.source.num_bytes is not None:
            self.bytes += sum(map(self.source.row_bytes, rows))
            self._bar.total = self.total()
        self._bar.update(len(rows))
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            _say(self.line(now - self._start))

    def total(self) -> int | None:
        """Return the rows of the source, estimated if its size is known only in bytes."""
        total = self.num_rows
        if total is None and self.source.num_bytes is not None and self.bytes:
            total = round(self.rows * self.source.num_bytes / self.bytes)
        return None if total is None else max(self.rows, total)

    def line(self, seconds: float) -> str:
        """Describe the progress after these seconds.

        >>> from nopad.packing.sources.in_memory import ListSource
        >>> progress = RowProgress(ListSource(["a"] * 400))
        >>> progress.add(["a"] * 100)
        >>> progress.line(seconds=2.0)
        'encoding list: 100 of 400 rows, 50 rows/s, 6 s left'
        """
        rate, total = self.rows / max(seconds, 1e-9), self.total()
        text = f"encoding {self.source.name}: {self.rows:,}"
        if total is None:
            return f"{text} rows, {rate:,.0f} rows/s"
        left = (total - self.rows) / rate
        about = "" if self.source.num_rows_is_exact else "about "
        return f"{text} of {about}{total:,} rows, {rate:,.0f} rows/s, {left:,.0f} s left"

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def announce_compilation(dispatcher: Any, what: str) -> Iterator[None]:
    """Print a line if numba compiles this function inside the block, which takes about 20 s."""
    with event.install_listener("numba:compile", _Announcement(dispatcher, what)):
        yield


class _Announcement(event.Listener):
    def __init__(self, dispatcher: Any, what: str):
        self.dispatcher, self.what = dispatcher, what

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is not self.dispatcher:
            return
        folder = self.dispatcher.stats.cache_path
        when = f"at the first start only; kept in {folder}"
        if not folder:
            when = "at every start: set NUMBA_CACHE_DIR to a persistent folder"
        _say(f"compiling {self.what} (about 20 s, {when})")

    def on_end(self, event: Any) -> None:
        pass


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(message: str) -> None:
    if _is_first_rank():
        tqdm.write(f"nopad: {message}", file=sys.stderr)
