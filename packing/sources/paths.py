"""Resolve a path to its files, none of them outside of it, and identify files by content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..state.fingerprint import Fingerprint

NAME_LIMIT = 255


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the file of this name inside a folder; raise if the name leads out of it.

    >>> resolve_inside(Path("."), "../secret")
    Traceback (most recent call last):
    ValueError: the name '../secret' leads out of its folder
    """
    shown = name if len(name) < 80 else name[:77] + "..."
    if not name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        raise ValueError(f"the name {shown!r} is empty or contains control characters")
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


def list_files(path: Path, glob: str | None = None) -> list[Path]:
    """List the files of a path, sorted by name: the file itself, or all matches in a folder."""
    if glob is not None and (not isinstance(glob, str) or Path(glob).is_absolute()):
        raise ValueError(f"glob={glob!r}: pass a pattern inside the folder, such as '*.jsonl'")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"{path} is neither a file nor a folder here; a dataset on the hub is named owner/name"
        )
    names = sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob(glob or "*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )
    if not names:
        raise ValueError(f"{path} has no file that matches {glob or '*'!r}")
    return [resolve_inside(path, name) for name in names]


def display_name(paths: Sequence[Path]) -> str:
    """Name files for messages: one file by its name, several by their folder."""
    return paths[0].name if len(paths) == 1 else paths[0].parent.name


def files_fingerprint(kind: str, paths: Sequence[Path], sizes: Sequence[int] = ()) -> str:
    """Identify files by their content; `sizes` are the bytes of each that count, default all."""
    fingerprint = Fingerprint(kind, len(paths))
    for path, size in zip_longest(paths, sizes):
        fingerprint.file(path, size)
    return fingerprint.text()
