"""From a path to the files it means, none of them outside of it, and what they are known by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..state.fingerprint import Fingerprint

NAME_LIMIT = 255


def contained(folder: Path, name: str) -> Path:
    """Give the file of this name inside a folder, or refuse a name that leads out of it.

    >>> contained(Path("."), "../secret")
    Traceback (most recent call last):
    ValueError: the name '../secret' leads out of its folder
    """
    shown = name if len(name) < 80 else name[:77] + "..."
    if not name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        raise ValueError(f"the name {shown!r} is empty or holds control characters")
    windows, posix = PureWindowsPath(name), PurePosixPath(name)
    if windows.drive or windows.root or posix.is_absolute() or name.startswith("~"):
        raise ValueError(f"the name {shown!r} is absolute: names are relative to their folder")
    if ".." in windows.parts or ".." in posix.parts:
        raise ValueError(f"the name {shown!r} leads out of its folder")
    if any(len(part.encode("utf-8", "surrogatepass")) > NAME_LIMIT for part in posix.parts):
        raise ValueError(f"the name {shown!r} has a part longer than {NAME_LIMIT} bytes")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"the name {shown!r} leads out of its folder through a link: pass a folder that holds "
            "the files themselves"
        )
    return path


def files_of(path: Path, glob: str | None = None) -> list[Path]:
    """List the files a path means, sorted by name: itself, or all that match in a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"{path} is neither a file nor a folder here; a dataset on the hub is called owner/name"
        )
    names = sorted(
        found.relative_to(path).as_posix()
        for found in path.rglob(glob or "*")
        if found.is_file() and not any(p.startswith(".") for p in found.relative_to(path).parts)
    )
    if not names:
        raise ValueError(f"{path} holds no file that matches {glob or '*'!r}")
    return [contained(path, name) for name in names]


def name_of(paths: Sequence[Path]) -> str:
    """Name some files for messages: the one by itself, several by their folder."""
    return paths[0].name if len(paths) == 1 else paths[0].parent.name


def files_fingerprint(kind: str, paths: Sequence[Path], sizes: Sequence[int] = ()) -> str:
    """Identify files by their content; `sizes` are how much of each counts, left out: all."""
    mark = Fingerprint(kind, len(paths))
    for path, size in zip_longest(paths, sizes):
        mark.file(path, size)
    return mark.text()
