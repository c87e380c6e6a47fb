"""Epochs in the HF Trainer, resumed with other ranks or accumulation: every pack exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_run
import warm_python
from epochs_child import StopAt
from hf_child import trainer
from nopad.trainer.with_hf import PackedTrainer

CHILD = Path(__file__).parents[1] / "support" / "epochs_child.py"


def train(folder, monkeypatch, accumulation: int, stop_at: int | None, data=None, **settings):
    """Train, or continue; return the packs that were trained and the trainer."""
    packs, step = [], PackedTrainer.training_step

    def noting(self, *args, **kwargs):
        packs.append(self._loader.issued[0][0])
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PackedTrainer, "training_step", noting)
        data = tiny_run.dataset(**data or {})
        run, _ = trainer(folder, data, accumulation, **{"num_train_epochs": 2, **settings})
        if stop_at is not None:
            run.add_callback(StopAt(stop_at))
        resumes = any(folder.glob("checkpoint-*"))
        run.train(resume_from_checkpoint=resumes)
    return [pack.index for pack in packs if len(pack.lengths)], run


@pytest.mark.parametrize(("first", "second", "stop_at"), [(1, 3, 14), (3, 1, 5), (2, 5, 6)])
@pytest.mark.parametrize("epochs", [pytest.param(2, marks=pytest.mark.slow), 1.5])
def test_another_accumulation_trains_every_pack_of_every_epoch_once(
    first, second, stop_at, epochs, tmp_path, monkeypatch
):
    whole, run = train(tmp_path / "whole", monkeypatch, 1, None, num_train_epochs=epochs)
    assert whole == list(range(len(whole))) and run.state.global_step == len(whole)
    parts = tmp_path / "parts"
    before, _ = train(parts, monkeypatch, first, stop_at, num_train_epochs=epochs)
    after, run = train(parts, monkeypatch, second, None, num_train_epochs=epochs)
    done = [*before, *after]
    # Half an epoch ends within a step: the step is completed from the data.
    assert done[: len(whole)] == whole and len(done) - len(whole) < (second if epochs == 1.5 else 1)
    assert run.state.global_step == run.state.max_steps


def test_a_finished_run_stays_finished_with_another_accumulation(tmp_path, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 1}
    _, run = train(tmp_path, monkeypatch, 3, None, **saving)
    step = run.state.global_step
    again, run = train(tmp_path, monkeypatch, 2, None)
    assert (again, run.state.global_step) == ([], step)


def test_max_packs_bound_the_epochs(tmp_path, monkeypatch):
    packs, run = train(tmp_path, monkeypatch, 2, None, {"max_packs": 7})
    assert (packs, run.state.global_step) == (list(range(7)), 4)


def test_max_steps_mean_what_they_say_after_a_resume(tmp_path, monkeypatch):
    train(tmp_path, monkeypatch, 1, 3, max_steps=8)
    after, run = train(tmp_path, monkeypatch, 2, None, max_steps=8)
    assert after == list(range(3, 13)) and run.state.global_step == 8


def test_another_number_of_ranks_trains_every_pack_of_every_epoch_once(tmp_path):
    done = warm_python.run([CHILD, tmp_path, "1:2", "2:1"], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2
    for packs, count in found:
        assert packs == list(range(count))
