"""A state on disk: JSON with a checksum, whole or not there at all, and the one before it.

    write   x.json.tmp ─▶ fsync ─▶ x.json kept as x.json.previous ─▶ renamed ─▶ folder fsync
    read    x.json, or x.json.previous if that one is torn; refused if neither is whole

A crash at any point leaves at least one whole state behind. What cannot be trusted (a checksum
that does not match, too large, nested too deep) is never used in silence.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SIZE_LIMIT = 8 << 20
"""Bytes; a state has at most 32 kB plus 12 kB a shard."""
FORMAT = "nopad-state-1"


def write_state(path: str | Path, state: dict) -> None:
    """Write a state so that a crash at any moment leaves this one or the one before it."""
    path = Path(path)
    data = _sealed(state)
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"a state of {len(data)} bytes, the limit is {SIZE_LIMIT}")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if _whole(path):  # a torn one must not push out the last good one
        _keep(path, _previous(path))
    temporary.replace(path)
    to_disk(path.parent)


def read_state(path: str | Path, fall_back: bool = True) -> dict:
    """Read a state; if the last one is torn or corrupt, the one before it, unless told not to."""
    path, reasons = Path(path), []
    for candidate in (path, _previous(path)) if fall_back else (path,):
        try:
            return _unsealed(candidate)
        except FileNotFoundError:
            reasons.append(f"{candidate.name} is not there")
        except (ValueError, OSError) as error:
            reasons.append(f"{candidate.name}: {error}")
    raise ValueError(f"no whole state at {path}: " + "; ".join(reasons))


def to_disk(path: Path) -> None:
    """Return when a file, or the list of a folder's files, is on the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sealed(state: dict) -> bytes:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)
    head = {"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return f'{json.dumps(head)[:-1]}, "state": {text}}}\n'.encode()


def _unsealed(path: Path) -> dict:
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"larger than the limit of {SIZE_LIMIT} bytes")
    try:
        whole: Any = json.loads(data.decode("ascii"))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError as error:
        raise ValueError(f"torn or corrupt, no JSON: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("state"), dict):
        raise ValueError("torn or corrupt: no state in it")
    # Sealing again and comparing every byte leaves no part of the file outside the checksum.
    if _sealed(whole["state"]) != data:
        raise ValueError("torn or corrupt: the checksum does not match")
    return whole["state"]


def _whole(path: Path) -> bool:
    try:
        _unsealed(path)
        return True
    except (ValueError, OSError):
        return False


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _keep(path: Path, previous: Path) -> None:
    """Let the old state be known under a second name, so that it is there at every moment."""
    spare = previous.with_name(previous.name + ".tmp")
    spare.unlink(missing_ok=True)
    try:
        os.link(path, spare)
    except OSError:  # a file system without links: a copy does it too
        spare.write_bytes(path.read_bytes())
    spare.replace(previous)
