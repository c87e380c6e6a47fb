"""Read ahead in the background: the next blocks of a binary file, or the result of a call."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from io import RawIOBase
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
BLOCK = 4 << 20
"""Bytes of a request."""
BLOCKS_AHEAD = 2


class ReadAheadFile(RawIOBase):
    """A seekable file over `read(begin, end)`; it holds at most BLOCKS_AHEAD + 2 blocks."""

    def __init__(self, read: Callable[[int, int], bytes], size: int):
        self.fetch, self.size, self.position = read, size, 0
        self._blocks: dict[int, Future[bytes]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer) -> int:
        if self.position >= self.size:
            return 0
        number, offset = divmod(self.position, BLOCK)
        data = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        """Return a block, and start to fetch those that follow it."""
        sequential = number == 0 or number - 1 in self._blocks or number in self._blocks
        last = min(number + BLOCKS_AHEAD * sequential, (self.size - 1) // BLOCK)
        wanted = range(number, last + 1)
        # The block before is kept: a line or a page may begin in it.
        kept = {n: b for n, b in self._blocks.items() if number - 1 <= n <= last}
        self._blocks = kept | {n: self._start(n) for n in wanted if n not in kept}
        try:
            return self._blocks[number].result()
        except Exception:
            self._blocks.clear()  # a later read asks again
            raise

    def _start(self, number: int) -> Future[bytes]:
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.size)
        return _in_background(lambda: self.fetch(begin, end))

    def close(self) -> None:
        self._blocks.clear()
        super().close()


def prefetch(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of calls; the next call runs in the background meanwhile.

    >>> list(prefetch([lambda: 1, lambda: 2]))
    [1, 2]
    """
    running: Future[T] | None = None
    for call in calls:
        following = _in_background(call)
        if running is not None:
            yield running.result()
        running = following
    if running is not None:
        yield running.result()


def _in_background(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a request that hangs must not keep the process from ending.
    Thread(target=run, name="nopad-read-ahead", daemon=True).start()
    return future
