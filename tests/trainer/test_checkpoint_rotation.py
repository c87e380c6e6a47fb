"""Checkpoints are rotated by their steps, whatever the clock says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_run
from hf_child import trainer
from nopad.trainer.checkpoint_manifest import rotate_checkpoints, steps_to_delete
from transformers import TrainerCallback

FUTURE = 4_000_000_000


class ClockSetBack(TrainerCallback):
    """Dates every checkpoint so that later ones look older."""

    def on_save(self, args, state, control, **_):
        for path in Path(args.output_dir).glob("checkpoint-*"):
            os.utime(path, (FUTURE, FUTURE - 1000 * int(path.name[11:])))


def test_a_clock_set_back_does_not_delete_new_checkpoints(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 5}
    run, _ = trainer(tmp_path, tiny_run.dataset(epochs=None), 1, **saving)
    run.add_callback(ClockSetBack())
    run.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize(
    ("steps", "newest", "limit", "keep", "deleted"),
    [
        ([100, 20, 3], 100, 2, set(), [3]),
        ([100, 20, 3], 100, 0, set(), []),
        ([1, 2, 3], 3, 1, set(), [1, 2]),
        ([1, 2, 3], 3, 1, {1}, [2]),
        ([50, 60, 100], 60, 2, set(), [100]),  # resumed from 50, by choice
        ([50, 60, 100], 60, 1, {100}, [50]),
        ([7], 7, 1, set(), []),
    ],
)
def test_the_oldest_go_first_and_the_newest_never(steps, newest, limit, keep, deleted):
    assert steps_to_delete(steps, newest, limit, keep) == deleted


def test_other_folders_are_left_alone(tmp_path):
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-2-copy", "checkpoint-best", "logs"):
        (tmp_path / name).mkdir()
    rotate_checkpoints(tmp_path, 2, 1, keep=[Path("elsewhere/best")])
    left = {"checkpoint-2", "checkpoint-2-copy", "checkpoint-best", "logs"}
    assert {path.name for path in tmp_path.iterdir()} == left
