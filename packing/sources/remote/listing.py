"""List the files of a URL: a file, a folder, or a pattern with `*`; sorted by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from .filesystem import MissingFileError, filesystem, retry, shown
from .remote_file import RemoteFile


def list_url(url: str, glob: str | None, check_name: Callable[[str], None]) -> list[RemoteFile]:
    """List the files of a URL; `check_name` raises on names that no file should have.

    glob: a pattern inside a folder, as `Path.rglob` takes it.
    """
    fs, path = filesystem(url)
    if "*" in path:
        found = retry(url, lambda: fs.glob(path, detail=True))
        folder = path.split("*")[0].rpartition("/")[0]
    elif _is_file(fs, url, path):
        return [RemoteFile(url, _size(fs, url, path, {}))]
    else:
        found = retry(url, lambda: fs.find(path, detail=True))
        folder = path
    names = {_relative(name, folder): (name, info) for name, info in found.items()}
    files = []
    for relative in sorted(names):
        name, info = names[relative]
        hidden = any(part.startswith(".") for part in PurePosixPath(relative).parts)
        if hidden or info.get("type") == "directory":
            continue
        if glob is None or PurePosixPath(relative).match(glob):
            check_name(relative)
            files.append(RemoteFile(_full_url(fs, url, name), _size(fs, url, name, info)))
    if not files:
        raise ValueError(f"{shown(url)} has no file that matches {glob or '*'!r}")
    return files


def exists(url: str) -> bool:
    """Return whether a file of this URL exists."""
    fs, path = filesystem(url)
    try:
        return bool(retry(url, lambda: fs.info(path)))
    except MissingFileError:
        return False


def _is_file(fs: Any, url: str, path: str) -> bool:
    if url.endswith("/"):  # a web server answers for a folder as for a file
        return False
    return retry(url, lambda: fs.info(path))["type"] == "file"


def _size(fs: Any, url: str, path: str, info: dict) -> int:
    size = info.get("size")
    if size is None:
        size = retry(url, lambda: fs.info(path)).get("size")
    if size is None:
        raise ValueError(f"{shown(url)}: the server does not report the size: download the file")
    return int(size)


def _relative(name: str, folder: str) -> str:
    """Return a listed name relative to its folder; a name outside the folder stays unchanged."""
    prefix = folder.rstrip("/") + "/"
    return name.removeprefix(prefix)


def _full_url(fs: Any, url: str, name: str) -> str:
    """Return the URL of a listed name, with the other protocols of a chain."""
    if "::" in url:
        return f"{re.split('::', url, maxsplit=1)[0]}::{fs.unstrip_protocol(name)}"
    return fs.unstrip_protocol(name)
