"""`RemoteFile`: a file behind a URL, with range reads and a part of `pathlib.Path`'s methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from os import stat_result
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from .filesystem import RemoteReadError, filesystem, retry, shown
from .read_ahead import BLOCK, ReadAheadFile

T = TypeVar("T")
R = TypeVar("R")

CONNECTIONS = 32
"""Requests at the same time."""


def read_together(read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what `read` returns for each item, in order; several wait for replies together."""
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        yield from pool.map(read, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, the others are not needed


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A URL and the size the file had when it was listed."""

    url: str
    size: int

    @property
    def path(self) -> PurePosixPath:
        """The path in the URL, without a query."""
        is_http = self.url.startswith(("http://", "https://"))
        return PurePosixPath(unquote(urlsplit(self.url).path) if is_http else self.url)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def suffixes(self) -> list[str]:
        return self.path.suffixes

    @property
    def parent(self) -> PurePosixPath:
        return self.path.parent

    def __str__(self) -> str:
        return shown(self.url)

    def stat(self) -> stat_result:
        """Return a status with only the size set."""
        return stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))

    def open(self, mode: str = "rb") -> BufferedReader:
        """Open the file for reading; the blocks that follow are fetched in the background."""
        assert mode == "rb"
        return BufferedReader(ReadAheadFile(self.read, self.size), BLOCK)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range, all of them."""
        return retry(self.url, lambda: self._request(begin, end)) if begin < end else b""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of several ranges, which are requested together."""
        return read_together(lambda span: self.read(*span), ranges)

    def read_text(self, encoding: str) -> str:
        """Return the text of the file."""
        return self.read(0, self.size).decode(encoding)

    def _request(self, begin: int, end: int) -> bytes:
        fs, path = filesystem(self.url)
        data = _fetch(fs, path, begin, end, self.size)
        if len(data) != end - begin:
            raise OSError(
                f"got {len(data)} of {end - begin} bytes at byte {begin} of a file that had "
                f"{self.size} bytes when it was opened"
            )
        return data


def _fetch(fs: Any, path: str, begin: int, end: int, size: int) -> bytes:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if "https" not in protocols:
        # hf:// opens a file for every call, whose buffer would request 5 MB more than the range.
        options = {"cache_type": "none", "size": size} if "hf" in protocols else {}
        return fs.cat_file(path, start=begin, end=end, **options)
    # `cat_file` would take in the whole body of a server that ignores ranges.
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    with fs.open(path, "rb", cache_type="none", size=size, headers=headers) as file:
        file.seek(begin)
        try:
            return file.read(end - begin)
        except ValueError as error:
            raise RemoteReadError(
                f"{shown(path)}: the server does not support range requests: download the file"
            ) from error
