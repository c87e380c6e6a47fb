"""Delete the oldest checkpoints of a run, by their steps: clocks may be set back."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

PREFIX = "checkpoint-"


def rotate_checkpoints(
    folder: Path, step: int, limit: int | None, keep: Collection[Path] = ()
) -> None:
    """Delete checkpoints of `folder` after the one of `step` was saved, until `limit` are left.

    limit: None or 0 deletes none.
    keep: checkpoints that are never deleted, such as the best one.
    """
    kept = {int(path.name[len(PREFIX) :]) for path in keep if _is_checkpoint(path)}
    steps = [int(path.name[len(PREFIX) :]) for path in folder.glob("*") if _is_checkpoint(path)]
    for old in steps_to_delete(steps, step, limit or 0, kept):
        shutil.rmtree(folder / f"{PREFIX}{old}", ignore_errors=True)


def steps_to_delete(steps: Iterable[int], newest: int, limit: int, keep: set[int]) -> list[int]:
    """Return the steps of the oldest checkpoints, as many as are above the limit.

    Steps after the newest checkpoint are of a run that was left, since this one resumed before
    them: they are older than all others.

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


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.name[len(PREFIX) :].isdecimal()
