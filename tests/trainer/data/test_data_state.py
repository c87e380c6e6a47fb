"""The data position in checkpoints of `torch.distributed.checkpoint`: nothing lost or repeated."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import tiny_run
from nopad.trainer import DataState, PackedLoader
from torch.distributed.checkpoint.stateful import Stateful

CHILD = Path(__file__).parent / "support" / "dcp_child.py"


@pytest.mark.parametrize(
    ("action", "kind", "before", "after"),
    [
        ("save", "streamed", 2, 1),
        ("async", "planned", 1, 2),
        pytest.param("async", "streamed", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_other_ranks_load_a_checkpoint_and_train_the_packs_that_are_left(
    tmp_path, action, kind, before, after
):
    lines = (json.dumps({"input_ids": row["input_ids"]}) + "\n" for row in tiny_run.samples(200))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    saved = tiny_run.launch(CHILD, action, kind, tmp_path, world=before)
    loaded = tiny_run.launch(CHILD, "load", kind, tmp_path, world=after)
    first, rest = sorted(chain(*saved)), sorted(chain(*loaded))
    assert first == list(range(3 * before))
    assert rest == list(range(3 * before, 3 * before + len(rest))) and len(rest) > 10


def test_a_data_state_is_a_stateful_of_one_text_that_notices_damage():
    loader = PackedLoader(tiny_run.dataset())
    next(iter(loader))
    state = DataState(loader)
    assert isinstance(state, Stateful)
    (text,) = state.state_dict().values()
    again = PackedLoader(tiny_run.dataset())
    DataState(again).load_state_dict(state.state_dict())
    assert again.state()["position"]["index"] == 1
    with pytest.raises(ValueError, match="checksum"):
        DataState(again).load_state_dict({"nopad_data": text.replace('"index":1', '"index":2')})
