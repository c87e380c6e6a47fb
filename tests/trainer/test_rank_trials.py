"""Several ranks: whatever the data, all stop together; whatever the ranks, the same packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm_python

TRIALS = Path(__file__).parent / "support" / "rank_trials.py"


def take(what: str, count: int, folder: Path, first: int = 0) -> None:
    command = [TRIALS, what, str(count), "--first", str(first)]
    done = warm_python.run([*command, "--folder", folder])
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == [] and found["trials"] == count and done.returncode == 0


def test_uneven_ranks_stop_after_the_same_step(tmp_path):
    take("uneven", 3, tmp_path, first=4)


def test_another_number_of_ranks_and_workers_goes_on_with_the_same_packs(tmp_path):
    take("moved", 1, tmp_path, first=7)  # Lightning, from two ranks to one


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("what", "count"), [("uneven", 200), ("moved", 12)])
def test_many_of_each_trial(what, count, tmp_path):
    take(what, count, tmp_path)
