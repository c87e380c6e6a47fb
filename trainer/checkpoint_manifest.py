"""A checkpoint's seal: what it consists of, written last, so that a torn or damaged one is known.

    checkpoint-40/model.safetensors  optimizer.bin  nopad_data.json  ...
    checkpoint-40/nopad_seal.json        every file's size, and the SHA-256 of all but the largest

A folder without a seal was never finished. Files are on the disk, not only in the system's
buffers, before the seal is.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from ..packing.state import fsync_path, read_state, write_state

MANIFEST = "nopad_seal.json"
HASHED_UP_TO = 1 << 26
"""Bytes. Hashing the weights of a large model would hold up its training: their size must do."""


def write_manifest(folder: Path) -> None:
    """Say that a checkpoint is whole; call it on one rank, when all of them have written."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in found if not path.name.startswith(MANIFEST)]  # nor the one before it
    for path in files:
        fsync_path(path)
    told = {str(path.relative_to(folder)): _facts(path) for path in files}
    write_state(folder / MANIFEST, {"files": told})


def remove_manifest(folder: Path) -> None:
    """Say that a checkpoint is about to be written again; on one rank, before any of them does."""
    (folder / MANIFEST).unlink(missing_ok=True)


def find_damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if it is what was sealed."""
    try:
        told = read_state(folder / MANIFEST, fall_back=False)["files"]
    except (ValueError, OSError):
        return f"its {MANIFEST} is missing or torn, so its save was cut short"
    for name, facts in told.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _facts(path) != facts:
            return f"{name} is torn or damaged"
    return None


def latest_intact_checkpoint(folder: Path) -> Path:
    """Return the newest sealed `checkpoint-N` that is as it was sealed."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    flaws = []
    for path in sorted(found, key=lambda path: int(path.name[11:]), reverse=True):
        wrong = find_damage(path)
        if wrong is None:
            return path
        flaws.append(f"; {path.name}: {wrong}")
    raise ValueError(
        f"{folder} has no whole checkpoint{''.join(flaws)}; without resuming, it starts anew"
    )


def check_archive(path: Path) -> None:
    """Refuse a checkpoint in one file, as torch writes it, if a byte of it is not as written."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a flipped byte in a header asks for a compression or a password of its own
        raise ValueError(f"{path} is no whole checkpoint: {error}") from None
    if damaged is not None:
        raise ValueError(f"{path} is no whole checkpoint: {damaged} is damaged in it")


def _facts(path: Path) -> list:
    size = path.stat().st_size
    if size > HASHED_UP_TO:
        return [size]
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()]
