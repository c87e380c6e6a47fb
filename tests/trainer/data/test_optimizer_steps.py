"""No optimizer step is empty: not on one rank, with or without workers, nor on several."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from nopad.packing import PackedDataset
from nopad.packing.state import merge_states
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


@pytest.fixture
def two_ranks(uneven, monkeypatch):
    """Return a function that opens the loader of one of two ranks; sums are those of both."""
    monkeypatch.setattr("nopad.trainer.data.loader.world_size", lambda: 2)

    def build(rank: int, count_items: bool = True, state: dict | None = None, **options):
        loader = PackedLoader(
            uneven(max_packs=MAX_PACKS, rank=rank, world_size=2), count_items=count_items, **options
        )
        if state is not None:
            loader.load_state(state)
        begin = loader.state()["position"]["index"]
        whole = {pack.index: len(pack.tokens) for pack in uneven(max_packs=MAX_PACKS)}
        size, asked = 2 * loader.accumulation_steps, []

        def sum_over_ranks(value):
            asked.append(value)
            if count_items and len(asked) % 2:  # label tokens
                return torch.tensor(float(value))
            first = begin + (len(asked) - 1) // (1 + count_items) * size
            return torch.tensor(float(sum(whole.get(first + n, 0) for n in range(size))))

        monkeypatch.setattr("nopad.trainer.data.loader.sum_over_ranks", sum_over_ranks)
        return loader, asked

    return build


MAX_PACKS = 10_000
"""Far more than the 79 places up to the last pack."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count_items", [True, False])
def test_a_step_that_is_empty_on_all_ranks_is_skipped(uneven, two_ranks, count_items, rank):
    """Shards 0 and 1 end first: then every other step would be empty, and at the end all."""
    whole = {pack.index: pack for pack in uneven(max_packs=MAX_PACKS)}
    rounds = [[whole[k] for k in (n, n + 1) if k in whole] for n in range(0, 80, 2)]
    loader, _ = two_ranks(rank, count_items)
    found = [labels(batch) for batch in loader]
    own = [[p for p in packs if p.index % 2 == rank] for packs in rounds if packs]
    assert found == [sum(pack.num_label_tokens for pack in packs) for packs in own]
    assert len(found) == 30
    assert loader.state()["finished"]


@pytest.mark.parametrize("accumulation, steps", [(1, 40 + 2), (2, 20 + 1), (4, 10 + 1)])
def test_several_ranks_end_once_every_shard_gave_an_empty_pack(two_ranks, accumulation, steps):
    """One step of two ranks has `accumulation` packs of each, and there are 4 shards."""
    loader, asked = two_ranks(0, False, accumulation_steps=accumulation)
    whole = [ids(batch) for batch in loader]
    assert len(asked) == steps + 1  # one step ahead
    stops = range(accumulation, len(whole), accumulation * max(1, len(whole) // 5 // accumulation))
    for stop in stops:
        loader, _ = two_ranks(0, False, accumulation_steps=accumulation)
        seen = [ids(batch) for _, batch in zip(range(stop), loader, strict=False)]
        state = merge_states([loader.state(), other_rank(two_ranks, accumulation, stop)])
        again, _ = two_ranks(0, False, state, accumulation_steps=accumulation)
        assert seen + [ids(batch) for batch in again] == whole
        assert again.state()["finished"]


def other_rank(two_ranks, accumulation: int, stop: int) -> dict:
    loader, _ = two_ranks(1, False, accumulation_steps=accumulation)
    for _ in zip(range(stop), loader, strict=False):
        pass
    return loader.state()


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_a_pack_is_refused(tmp_path, workers):
    pq.write_table(pa.table({"input_ids": [[1] * 40] * 20}), tmp_path / "long.parquet")
    stream = {"budget": 32, "shards": 4, "pretokenize": False, "overflow": "drop"}
    data = PackedDataset(tmp_path / "long.parquet", **stream)
    with pytest.raises(ValueError, match=r"there is nothing to pack.* max_packs= ends before"):
        list(PackedLoader(data, num_workers=workers))
