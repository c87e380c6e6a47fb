"""Progress messages while data is prepared: tokens encoded, and compilation of the packer.

    encoding corpus.jsonl: 41%|████      | 9.3M/22.7M [00:33<00:47, 281k tokens/s]        terminal
    nopad: encoding corpus.jsonl: 9,300,000 of about 22,700,000 tokens, 281,000 tokens/s, 47 s left

Only the first rank, or its first worker, prints them, for work that takes more than a few seconds.
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

from .numba_jit import cache_folder, is_being_compiled

SHOWN_AFTER = 2
"""Seconds after which a terminal shows the bar."""
LINE_INTERVAL = 30
"""Seconds between two lines where there is no terminal."""
LONGEST_WAIT = 60
"""Seconds after which a process compiles what another one has not finished."""


class TokenProgress:
    """Shows how many tokens were encoded, how fast, and the time left."""

    def __init__(self, what: str):
        self.what, self.tokens = what, 0
        self.total: int | None = None
        """Estimate of all tokens."""
        self._start = self._last_line = time.monotonic()
        # Even a disabled bar takes tqdm's lock, which a forked process that was killed may hold.
        self._bar = None
        if _is_first_process() and sys.stderr.isatty():
            self._bar = tqdm(
                desc=what, unit=" tokens", unit_scale=True, leave=False, delay=SHOWN_AFTER,
                dynamic_ncols=True,
            )  # fmt: skip

    def update(self, tokens: int, total: float | None) -> None:
        """Set the tokens encoded so far, and an estimate of all."""
        self.total = None if total is None else max(tokens, round(total))
        new_tokens, self.tokens, now = tokens - self.tokens, tokens, time.monotonic()
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(new_tokens)
        elif now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            say(self.line(now - self._start))

    def line(self, seconds: float) -> str:
        """Describe the progress after these seconds.

        >>> progress = TokenProgress("encoding corpus.jsonl")
        >>> progress.update(1000, total=4000)
        >>> progress.line(seconds=2.0)
        'encoding corpus.jsonl: 1,000 of about 4,000 tokens, 500 tokens/s, 6 s left'
        """
        rate = self.tokens / max(seconds, 1e-9)
        if self.total is None or not rate:
            return f"{self.what}: {self.tokens:,} tokens, {rate:,.0f} tokens/s"
        left = (self.total - self.tokens) / rate
        of = f"{self.tokens:,} of about {self.total:,} tokens"
        return f"{self.what}: {of}, {rate:,.0f} tokens/s, {left:,.0f} s left"

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def announce_compilation(dispatcher: Any, what: str) -> Iterator[None]:
    """Wait for a process that compiles this function, then run the block, which may compile it.

    Prints a line before either, because it takes several seconds.
    """
    announcement = _Announcement(dispatcher, what)
    # A function that is not compiled yet; with NUMBA_DISABLE_JIT it has no signatures at all.
    if getattr(dispatcher, "signatures", None) == []:
        _wait_for_compilation(dispatcher, announcement)
    with event.install_listener("numba:compile", announcement):
        yield


def _wait_for_compilation(dispatcher: Any, announcement: _Announcement) -> None:
    deadline = time.monotonic() + LONGEST_WAIT
    while is_being_compiled(dispatcher) and time.monotonic() < deadline:
        announcement.announce()
        time.sleep(0.05)


class _Announcement(event.Listener):
    def __init__(self, dispatcher: Any, what: str):
        self.dispatcher, self.what, self._printed = dispatcher, what, False

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"] is self.dispatcher:
            self.announce()

    def on_end(self, event: Any) -> None:
        pass

    def announce(self) -> None:
        """Print the line, once."""
        if self._printed:
            return
        self._printed = True
        when = "at every start: set NUMBA_CACHE_DIR to a persistent folder"
        if folder := cache_folder(self.dispatcher):
            when = f"at the first start only; kept in {folder}"
        say(f"compiling {self.what} (about 10 s, {when})")


def _is_first_process() -> bool:
    """Return whether this is the first rank, and its first worker if it is one."""
    data = sys.modules.get("torch.utils.data")  # loaded in workers; tokenizing needs no torch
    worker = None if data is None else data.get_worker_info()
    return os.environ.get("RANK", "0") == "0" and (worker is None or worker.id == 0)


def say(message: str) -> None:
    """Print a line, in the first process."""
    if _is_first_process():
        write = tqdm.write if sys.stderr.isatty() else print  # a terminal may show a bar
        write(f"nopad: {message}", file=sys.stderr)
