"""The report accounts for all data, planned or streamed."""

import numpy as np
import pytest
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader


@pytest.mark.parametrize("pretokenize", [True, False])
@pytest.mark.parametrize(
    "overflow, packed, lost", [("split", 130, 0), ("truncate", 62, 68), ("drop", 30, 100)]
)
def test_tokens_in_are_tokens_out_and_what_was_cut(pretokenize, overflow, packed, lost):
    rows = [np.arange(10), np.arange(100), np.arange(20), []]
    data = PackedDataset(
        rows,
        budget=32,
        pool=1,
        overflow=overflow,
        on_error="skip",
        pretokenize=pretokenize,
        shards=1,
    )
    assert sum(len(pack.tokens) for pack in data) == packed
    account = data.report()
    assert account["items"] == 3 and account["tokens"] == 130
    assert account["packed_tokens"] == packed
    assert account["truncated_tokens"] + account["dropped_tokens"] == lost
    assert account["skipped"]["rows"] == 1
    assert (account["split"], account["truncated"], account["dropped"]) == {
        "split": (1, 0, 0), "truncate": (0, 1, 0), "drop": (0, 0, 1),
    }[overflow]  # fmt: skip


@pytest.mark.parametrize("pretokenize", [True, False])
def test_the_realised_shares_of_a_mixture_are_reported(tools, pretokenize):
    one, two = tools.documents(400), tools.documents(400, seed=1)
    data = PackedDataset(
        [(one, 3), (two, 1)], budget=128, pool=16, pretokenize=pretokenize, shards=1
    )
    for _ in data:
        pass
    assert data.report()["shares"] == pytest.approx([0.75, 0.25], abs=0.03)


@pytest.mark.filterwarnings("ignore")
def test_what_workers_read_is_reported_from_the_packs_they_sent(tools, jsonl):
    path = jsonl(tools.documents(2000))
    data = PackedDataset(path, budget=128, pool=16, pretokenize=False, shards=2)
    for pack in DataLoader(data, batch_size=None, num_workers=2):
        data.mark_trained(pack)
    account = data.report()
    assert 0.8 * 2000 <= account["items"] <= 2000 and account["packs"] > 0


def test_a_data_set_tells_the_lengths_it_knows_and_the_plan_of_any_epoch(jsonl):
    rows = [[1, 2, 3], [4] * 5, [6, 7]]
    data = PackedDataset(rows, budget=8)
    assert data.lengths.tolist() == [3, 5, 2]
    assert data.report(2)["packs"] == data.count(2) and data.report() == data.report(0)
    stream = PackedDataset(jsonl(rows), budget=8, pretokenize=False, shards=1)
    assert stream.lengths is None and stream.report(2) == stream.report()
