"""State files: checksummed JSON, replaced atomically, the previous version kept as a backup.

    write   x.json.tmp ─▶ fsync ─▶ x.json kept as x.json.previous ─▶ rename ─▶ fsync of the folder
    read    x.json, or x.json.previous if x.json is corrupted; an error if neither is intact

A crash at any point leaves at least one intact state. Untrusted content (a checksum that does not
match, a file that is too large or nested too deeply) is never used silently.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

SIZE_LIMIT = 8 << 20
"""Bytes; a state has at most 32 kB plus 12 kB per shard."""
FORMAT = "nopad-state-1"


def write_state(path: str | Path, state: dict) -> None:
    """Write a state so that a crash at any moment leaves this one or the previous one."""
    path = Path(path)
    data = encode_state(state)
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"the state has {len(data)} bytes, the limit is {SIZE_LIMIT}")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if _is_intact(path):  # a corrupted state must not replace the last good one
        _keep_previous(path, _previous(path))
    temporary.replace(path)
    fsync_path(path.parent)


def read_state(path: str | Path, fall_back: bool = True) -> dict:
    """Read a state; if it is corrupted and `fall_back` is set, read the previous one."""
    path, reasons = Path(path), []
    for candidate in (path, _previous(path)) if fall_back else (path,):
        try:
            return _read(candidate)
        except FileNotFoundError:
            reasons.append(f"{candidate.name} does not exist")
        except (ValueError, OSError) as error:
            reasons.append(f"{candidate.name}: {error}")
    raise ValueError(f"no intact state at {path}: " + "; ".join(reasons))


def fsync_path(path: Path) -> None:
    """Return when a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_state(state: dict) -> bytes:
    """Return a state as text with its checksum."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)
    header = {"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return f'{json.dumps(header)[:-1]}, "state": {text}}}\n'.encode()


def decode_state(data: bytes) -> dict:
    """Return the state in a text; raise if it is not intact."""
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"larger than the limit of {SIZE_LIMIT} bytes")
    try:
        content: Any = json.loads(data.decode("ascii"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"truncated or corrupted, not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict):
        raise ValueError("truncated or corrupted: it contains no state")
    # Encoding again and comparing every byte leaves no part of the text outside the checksum.
    if encode_state(content["state"]) != data:
        raise ValueError("truncated or corrupted: the checksum does not match")
    return content["state"]


def _read(path: Path) -> dict:
    with path.open("rb") as file:
        return decode_state(file.read(SIZE_LIMIT + 1))


def _is_intact(path: Path) -> bool:
    try:
        _read(path)
        return True
    except (ValueError, OSError):
        return False


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _keep_previous(path: Path, previous: Path) -> None:
    """Give the old state a second name, so that it exists at every moment."""
    spare = previous.with_name(previous.name + ".tmp")
    spare.unlink(missing_ok=True)
    try:
        os.link(path, spare)
    except OSError:  # a file system without links: copy instead
        spare.write_bytes(path.read_bytes())
    spare.replace(previous)
