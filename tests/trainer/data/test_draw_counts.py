"""The counters of generation are in the checkpoints of every front end, and continue there."""

from __future__ import annotations

import pytest
import tiny_run
from nopad.runtime import draw_counts, number_call
from nopad.trainer.data import PackedLoader, gather_data_state, load_data_state, save_data_state
from nopad.trainer.data.data_state import restore_draws

pytestmark = pytest.mark.usefixtures("no_draws_yet")


def test_a_checkpoint_holds_them(tmp_path):
    """HF Trainer and Accelerate keep the data state in a file, Lightning in its checkpoint."""
    loader = PackedLoader(tiny_run.dataset())
    number_call()
    save_data_state(loader, tmp_path)
    in_lightning = gather_data_state(loader)
    assert number_call() == ("direct", 1)
    number_call("/all ranks")
    load_data_state(PackedLoader(tiny_run.dataset()), tmp_path)
    assert draw_counts() == {"direct": 1} and number_call() == ("direct", 1)
    tiny_run.dataset().load_state_dict(restore_draws(in_lightning))
    assert draw_counts() == {"direct": 1}


def test_a_rank_that_drew_more_repeats_nothing(tmp_path, monkeypatch):
    loader = PackedLoader(tiny_run.dataset())
    number_call()
    ahead = (loader.state(), {"direct": 3, "eval/": 1})
    monkeypatch.setattr("nopad.trainer.data.data_state.gather_objects", lambda own: [own, ahead])
    save_data_state(loader, tmp_path)
    load_data_state(loader, tmp_path)
    assert draw_counts() == {"direct": 3, "eval/": 1}
