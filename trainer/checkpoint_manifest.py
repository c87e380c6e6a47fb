"""Manifests of checkpoints: write them, find the newest intact checkpoint, delete the oldest.

    checkpoint-40/model.safetensors  optimizer.bin  nopad_data.json  ...
    checkpoint-40/nopad_manifest.json    the size of every file, and the SHA-256 of smaller ones

A checkpoint without a manifest was never finished. All other files are flushed to disk before the
manifest is written. A run resumes from the newest intact checkpoint, and deletes the oldest ones.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from ..packing.state import fsync_path, read_state, write_state

PREFIX = "checkpoint-"
MANIFEST_NAME = "nopad_manifest.json"
HASHED_UP_TO = 1 << 26
"""Bytes. For larger files only the size is checked: hashing large weights would delay training."""


def write_manifest(folder: Path) -> None:
    """Mark the checkpoint in `folder` as complete, on one rank, after all ranks have written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_manifest(path))
    for path in files:
        fsync_path(path)
    entries = {str(path.relative_to(folder)): _entry(path) for path in files}
    write_state(folder / MANIFEST_NAME, {"files": entries})


def remove_manifest(folder: Path) -> None:
    """Mark a checkpoint as incomplete before it is written again; call it on one rank."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


def find_manifest(folder: Path) -> Path | None:
    """Return the path of the manifest of the checkpoint in `folder`; None if it has none."""
    path = folder / MANIFEST_NAME
    return path if path.is_file() else None


def find_damage(folder: Path) -> str | None:
    """Describe the damage of a checkpoint; None if its files match the manifest."""
    try:
        entries = read_state(folder / MANIFEST_NAME, fall_back=False)["files"]
    except (ValueError, OSError):
        return f"its {MANIFEST_NAME} is missing or corrupted, so its save was interrupted"
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _entry(path) != entry:
            return f"{name} is truncated or corrupted"
    return None


def latest_intact_checkpoint(folder: Path) -> Path:
    """Return the newest `checkpoint-N` in `folder` whose files match its manifest."""
    damages = []
    for _, path in sorted(_checkpoints(folder.glob("*")).items(), reverse=True):
        damage = find_damage(path)
        if damage is None:
            return path
        damages.append(f"; {path.name}: {damage}")
    raise ValueError(
        f"{folder} has no intact checkpoint{''.join(damages)}; start over without resuming"
    )


def rotate_checkpoints(
    folder: Path, step: int, limit: int | None, keep: Collection[Path] = ()
) -> None:
    """Delete the oldest checkpoints of `folder`, after that of `step` was saved, down to `limit`.

    Age is determined by steps, because clocks may be set back.

    limit: None or 0 deletes none.
    keep: checkpoints that are never deleted, such as the best one.
    """
    steps = _checkpoints(folder.glob("*"))
    for old in steps_to_delete(steps, step, limit or 0, set(_checkpoints(keep))):
        shutil.rmtree(folder / f"{PREFIX}{old}", ignore_errors=True)


def steps_to_delete(steps: Iterable[int], newest: int, limit: int, keep: set[int]) -> list[int]:
    """Return the steps of the oldest checkpoints beyond the limit.

    Steps after the newest checkpoint belong to an abandoned run, since this one resumed before
    them: they count as older than all others.

    >>> steps_to_delete([10, 20, 30, 90], newest=30, limit=2, keep=set())
    [90, 10]
    >>> steps_to_delete([10, 20, 30], newest=30, limit=1, keep={10})
    [20]
    """
    if limit <= 0:
        return []
    oldest_first = sorted(steps, key=lambda step: (step <= newest, step))
    deletable = [step for step in oldest_first if step != newest and step not in keep]
    return deletable[: max(0, len(oldest_first) - limit)]


def latest_intact_archive(folder: Path) -> Path:
    """Return the single-file checkpoint (Lightning's `*.ckpt`) of the highest step in `folder`.

    Damaged checkpoints are skipped: a kill may have interrupted the save of any of them.
    """
    steps, damages = {}, []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            steps[path] = _archive_step(path)
        except ValueError as error:
            damages.append(f"; {error}")
    for path in sorted(steps, key=lambda path: (steps[path], path.name == "last.ckpt"))[::-1]:
        try:
            check_archive(path)
        except ValueError as error:
            damages.append(f"; {error}")
            continue
        if damages:
            tqdm.write(f"resuming from {path}, step {steps[path]}{''.join(damages)}")
        return path
    raise ValueError(
        f"{folder} has no intact checkpoint{''.join(damages)}; start over without resuming"
    )


def _archive_step(path: Path) -> int:
    """Return the step of a single-file checkpoint, without reading its tensors."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(checkpoint["global_step"])
    except Exception as error:  # torch raises anything on damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ValueError(f"{path} is not an intact checkpoint: {reason}") from None


def check_archive(path: Path) -> None:
    """Refuse the single-file checkpoint of torch.save at `path` if any byte of it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a flipped byte in a header may ask for a compression or a password
        raise ValueError(f"{path} is not an intact checkpoint: {error}") from None
    if damaged is not None:
        raise ValueError(f"{path} is not an intact checkpoint: {damaged} in it is damaged")


def _checkpoints(paths: Iterable[Path]) -> dict[int, Path]:
    """Return the paths that are checkpoints, with their steps."""
    named = [path for path in paths if path.name.startswith(PREFIX)]
    steps = {path.name.removeprefix(PREFIX): path for path in named}
    return {int(step): path for step, path in steps.items() if step.isdecimal()}


def _is_manifest(path: Path) -> bool:
    """Whether this is a manifest, or the previous version that `write_state` keeps beside it."""
    return path.name.startswith(MANIFEST_NAME)


def _entry(path: Path) -> list:
    size = path.stat().st_size
    if size > HASHED_UP_TO:
        return [size]
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()]
