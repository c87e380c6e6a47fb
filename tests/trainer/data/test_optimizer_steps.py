"""No optimizer step is empty: not on one rank, with or without workers, nor on several."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from nopad.packing import PackedDataset
from nopad.trainer.data import PackedLoader


@pytest.fixture
def uneven(tmp_path):
    """Return a function that opens a stream of shards with 5, 10, 20 and 0 packs."""
    lengths = np.repeat([8, 16, 32, 40], 20).tolist()
    rows = [[n + 1] * length for n, length in enumerate(lengths)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "rows.parquet")

    def build(**options):
        options = {"budget": 32, "shards": 4, "pretokenize": False, "overflow": "drop", **options}
        return PackedDataset(tmp_path / "rows.parquet", **options)

    return build


def labels(batch: dict) -> int:
    return int((batch["labels"] != -100).sum())


def ids(batch: dict) -> list:
    return batch["input_ids"].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_step_of_one_rank_has_packs_with_labels_alone(uneven, workers):
    whole = [pack.tokens.tolist() for pack in uneven()]
    loader = PackedLoader(uneven(), num_workers=workers)
    assert [ids(batch)[0] for batch in loader] == whole and len(whole) == 35
    assert loader.state()["finished"] and loader.dataset.report()["packs"] == 35


@pytest.mark.parametrize("before, after", [(0, 2), (2, 0), (2, 2)])
def test_a_run_is_resumed_among_shards_that_have_ended(uneven, before, after):
    whole = [ids(batch) for batch in PackedLoader(uneven(), accumulation_steps=2)]
    for steps in (1, 9):
        loader = PackedLoader(uneven(), accumulation_steps=2, num_workers=before)
        seen = [ids(batch) for _, batch in zip(range(2 * steps), loader, strict=False)]
        again = PackedLoader(uneven(), accumulation_steps=2, num_workers=after)
        again.load_state(json.loads(json.dumps(loader.state())))
        assert seen + [ids(batch) for batch in again] == whole


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count_items", [True, False])
def test_a_step_that_is_empty_on_all_ranks_is_left_out(uneven, monkeypatch, count_items, rank):
    """Shards 0 and 1 end first: then every other step would be empty, and at the end all."""
    whole = {pack.index: pack for pack in uneven(max_packs=100)}
    rounds = [[whole[k] for k in (n, n + 1) if k in whole] for n in range(0, 100, 2)]
    tokens = iter([sum(len(pack.tokens) for pack in packs) for packs in rounds])
    asked = []

    def sum_over_ranks(value):
        asked.append(value)
        is_label_count = count_items and len(asked) % 2
        return torch.tensor(float(value if is_label_count else next(tokens)))

    monkeypatch.setattr("nopad.trainer.data.loader.world_size", lambda: 2)
    monkeypatch.setattr("nopad.trainer.data.loader.sum_over_ranks", sum_over_ranks)
    data = uneven(max_packs=100, rank=rank, world_size=2)
    loader = PackedLoader(data, count_items=count_items)
    found = [labels(batch) for batch in loader]
    own = [[p for p in packs if p.index % 2 == rank] for packs in rounds if packs]
    assert found == [sum(pack.num_label_tokens for pack in packs) for packs in own]
    assert len(found) == 30
    assert loader.state()["finished"] and next(tokens, None) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_a_pack_is_refused(tmp_path, workers):
    pq.write_table(pa.table({"input_ids": [[1] * 40] * 20}), tmp_path / "long.parquet")
    stream = {"budget": 32, "shards": 4, "pretokenize": False, "overflow": "drop"}
    data = PackedDataset(tmp_path / "long.parquet", **stream)
    with pytest.raises(ValueError, match="there is nothing to pack"):
        list(PackedLoader(data, num_workers=workers))
