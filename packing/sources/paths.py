"""Resolve a path to its files, none of them outside it, and identify files by content.

At most 64 MB of a set of files, or 256 pieces of them, are read to identify it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..state.fingerprint import NUM_PIECES, Fingerprint, content_ranges
from .remote import RemoteFile, read_together

DataFile = Path | RemoteFile
NAME_LIMIT = 255


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the file of this name inside a folder; raise if the name leads out of it.

    >>> resolve_inside(Path("."), "../secret")
    Traceback (most recent call last):
    ValueError: the name '../secret' leads out of its folder
    """
    check_name(name)
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"the name {_short(name)!r} leads out of its folder through a link: pass a folder that "
            "holds the files themselves"
        )
    return path


def check_name(name: str) -> None:
    """Raise if a name cannot be that of a file inside a folder."""
    shown = _short(name)
    if not name or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        raise ValueError(f"the name {shown!r} is empty or contains control characters")
    windows, posix = PureWindowsPath(name), PurePosixPath(name)
    if windows.drive or windows.root or posix.is_absolute() or name.startswith("~"):
        raise ValueError(f"the name {shown!r} is absolute: names are relative to their folder")
    if ".." in windows.parts or ".." in posix.parts:
        raise ValueError(f"the name {shown!r} leads out of its folder")
    if any(len(part.encode("utf-8", "surrogatepass")) > NAME_LIMIT for part in posix.parts):
        raise ValueError(f"the name {shown!r} has a part longer than {NAME_LIMIT} bytes")


def _short(name: str) -> str:
    return name if len(name) < 80 else name[:77] + "..."


def list_files(path: Path, glob: str | None = None) -> list[Path]:
    """List the files of a path, sorted by name: the file itself, or all matches in a folder."""
    if glob is not None and (not isinstance(glob, str) or Path(glob).is_absolute()):
        raise ValueError(f"glob={glob!r}: pass a pattern inside the folder, such as '*.jsonl'")
    if path.is_file():
        return [path]
    if "*" in path.name and path.parent.is_dir() and glob is None:
        return [file for file in list_files(path.parent, path.name) if file.parent == path.parent]
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


def display_name(paths: Sequence[DataFile]) -> str:
    """Name files for messages: one file by its name, several by their folder."""
    return paths[0].name if len(paths) == 1 else paths[0].parent.name


def files_fingerprint(kind: str, files: Sequence[DataFile], sizes: Sequence[int] = ()) -> str:
    """Identify files by their content, not by names or dates: a copy is the same data.

    sizes: number of bytes of each file that count; default: all.
    """
    sizes = sizes or [file.stat().st_size for file in files]
    ranges = _ranges_of_files(sizes)
    pieces = _read_pieces([(f, r) for f, spans in zip(files, ranges, strict=True) for r in spans])
    fingerprint = Fingerprint(kind, len(files))
    for size, spans in zip(sizes, ranges, strict=True):
        fingerprint.file(size, (next(pieces) for _ in spans))
    return fingerprint.text()


def _ranges_of_files(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the ranges of each file that identify it: about as many as for a single file."""
    total = sum(sizes)
    per_file, step = max(1, NUM_PIECES // len(sizes)), max(1, len(sizes) // NUM_PIECES)
    return [
        content_ranges(size, size, total=total, pieces=0 if number % step else per_file)
        for number, size in enumerate(sizes)
    ]


def _read_pieces(pieces: list[tuple[DataFile, tuple[int, int]]]) -> Iterator[bytes]:
    read = read_together if pieces and isinstance(pieces[0][0], RemoteFile) else map
    return iter(read(_read_piece, pieces))


def _read_piece(piece: tuple[DataFile, tuple[int, int]]) -> bytes:
    file, (begin, end) = piece
    if isinstance(file, RemoteFile):
        return file.read(begin, end)
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(end - begin)
