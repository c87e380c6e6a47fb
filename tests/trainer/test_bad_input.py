"""What would train wrongly is refused before the first step, by name, in every front end."""

from __future__ import annotations

import pytest
import tiny_run
from front_ends import FIRST_STEP
from nopad.packing import PackedDataset


def stream(*rows):
    """Rows whose lengths nobody knows before reading them."""
    order = {"strategy": "sequential", "shuffle": False, "shards": 1, "pretokenize": False}
    return PackedDataset(lambda: iter(rows), budget=128, **order)


SILENT = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
BAD = {
    "another vocabulary": (
        lambda: PackedDataset([[5, 61, 7]], budget=32),
        "token 61 is outside the model's vocabulary of 61",
    ),
    "labels that are not their tokens": (
        lambda: PackedDataset([{"input_ids": [5, 6, 7], "labels": [5, 6, 99]}], budget=32),
        "the label of token 2 is 99, the token is 7",
    ),
    "no counted label": (
        lambda: PackedDataset([SILENT], budget=32),
        "no label of the first steps counts",
    ),
    "a sequence over the positions": (
        lambda: PackedDataset([[1] * 100], budget=128),
        "a sequence of 100 tokens is beyond the model's 64 positions",
    ),
    "a sequence over the positions in a stream": (
        lambda: stream([1] * 100),
        "pack 0 holds a sequence of 100 tokens, beyond the model's 64 positions",
    ),
}


@pytest.mark.parametrize("front", FIRST_STEP)
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_before_the_first_step(what, front, tmp_path):
    data, message = BAD[what]
    model = tiny_run.model()
    before = tiny_run.digest(model)
    with pytest.raises(ValueError, match=message):
        FIRST_STEP[front](model, data(), tmp_path, accumulation=1)
    assert tiny_run.digest(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_a_sequence_over_the_positions_is_refused_later_in_a_stream_too():
    from nopad.trainer.data import PackedLoader
    from nopad.trainer.monitoring.preflight import check_first_batches

    loader = PackedLoader(stream(*[[1] * 60] * 4, [1] * 70))
    check_first_batches(loader, tiny_run.model())
    handed_out = []
    with pytest.raises(ValueError, match="sequence of 70 tokens, beyond the model's 64"):
        for batch in loader:
            handed_out.append(batch)
    assert len(handed_out) == 2


@pytest.mark.parametrize(("token", "label"), [(61, -100), (9, 99), (9, -3)])
def test_an_id_outside_the_vocabulary_is_refused_in_every_batch(token, label):
    from nopad.trainer.data import PackedLoader
    from nopad.trainer.monitoring.preflight import check_first_batches

    def collate(pack):
        batch = tiny_run.collate(pack)
        if pack.index == 2:
            batch["input_ids"][0, 5], batch["labels"][0, 5] = token, label
        return batch

    loader = PackedLoader(stream(*[[1] * 60] * 8), collate)
    check_first_batches(loader, tiny_run.model())
    culprit = f"token {token}" if token > 60 else f"label {label}"
    handed_out = []
    with pytest.raises(ValueError, match=f"^pack 2: {culprit} is outside the model's vocabulary"):
        for batch in loader:
            handed_out.append(batch)
    assert len(handed_out) == 2
