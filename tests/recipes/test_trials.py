"""Recipes under signals, crashes, dead workers and changed data end as documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm_python

TRIALS = Path(__file__).parent / "support" / "trials.py"
QUICK = ["signals:pretrain_lightning:1:2", "crashes:train_hf:1:3", "changed:train_hf:1"]
LONG = [
    *(f"signals:{recipe}:200" for recipe in ("pretrain", "train_hf", "pretrain_lightning")),
    *(f"crashes:{recipe}:14" for recipe in ("pretrain", "train_hf")),
    *(f"changed:{recipe}:5" for recipe in ("pretrain", "train_hf", "pretrain_lightning")),
    "killed:pretrain:200",
]


def run_trials(folder: Path, *trials: str) -> None:
    command = [TRIALS, "--folder", str(folder), *trials]
    done = warm_python.run(command)
    assert done.stdout, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert list(results) == list(trials)
    assert [result["failures"] for result in results.values()] == [[]] * len(trials)
    assert done.returncode == 0


def test_a_few_of_each_trial(tmp_path):
    run_trials(tmp_path, *QUICK)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("trials", LONG)
def test_many_of_each_trial(trials, tmp_path):
    run_trials(tmp_path, trials)
