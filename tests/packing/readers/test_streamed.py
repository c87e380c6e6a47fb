"""Streams of shards that end at different times: no empty pack, no epoch before its turn."""

import itertools
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader

SHARDS = 4
STREAM = {"budget": 32, "shards": SHARDS, "pretokenize": False}


@pytest.fixture
def uneven(tmp_path):
    """Return a function that opens a file of shards that have 0, 5, 20 and 40 packs.

    The rows of the first are too long to be packed.
    """
    lengths = np.repeat([40, 4, 15, 28], 40).tolist()
    rows = [[n + 1] * length for n, length in enumerate(lengths)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "rows.parquet")
    return partial(PackedDataset, tmp_path / "rows.parquet", overflow="drop", **STREAM)


def documents(packs):
    """The numbers of the documents of packs, in their order; each consists of one token id."""
    firsts = (pack.tokens[pack.cu_seqlens[:-1]] for pack in packs)
    return np.concatenate([np.zeros(0, np.int64), *firsts]).tolist()


def saved(data):
    return json.loads(json.dumps(data.state_dict()))


def test_a_stream_of_one_rank_has_no_empty_packs(uneven, tools):
    packs = list(uneven())
    assert all(len(pack.tokens) for pack in packs)
    assert sorted(documents(packs)) == list(range(41, 161))
    assert [sum(p.index % SHARDS == shard for p in packs) for shard in range(4)] == [0, 5, 20, 40]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packs_and_states_do_not_depend_on_who_passes_over_ended_shards(
    uneven, tools, workers, epochs
):
    """The run is continued here and there, by one reader and by four."""
    whole = tools.full(uneven(epochs=epochs))
    run, found = tools.Run(partial(uneven, epochs=epochs), 1, workers), []
    for number, pack in enumerate(run.packs()):
        found += tools.full([pack])
        if number in (4, 9, 33, 75):
            for other in (1, 4):
                again = tools.Run(partial(uneven, epochs=epochs), 1, other).load(run.saved())
                assert found + tools.full(again.packs()) == whole
    assert found == whole


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_the_state_of_a_worker_counts_the_places_of_ended_shards(uneven, tools, cut):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")

    def loader():
        return torchdata.StatefulDataLoader(uneven(), batch_size=None, num_workers=1)

    assert tools.resumed(loader, cut) == tools.full(uneven())


def test_what_a_shard_drops_after_its_last_pack_is_reported(uneven):
    data = uneven()
    list(data)
    report = data.report()
    assert report["dropped"] == 40 and report["items"] == 160


def test_a_pack_that_was_not_marked_is_noticed_among_ended_shards(uneven):
    data = uneven()
    packs = list(data)
    data.mark_trained(*packs[:-2])
    with pytest.raises(ValueError, match=f"but pack {packs[-2].index} comes next"):
        data.mark_trained(packs[-1])


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_see_equally_many_packs_and_those_of_one(uneven, tools, world_size):
    whole = [tools.digest(pack) for pack in uneven(max_packs=80)]
    together = list(tools.Run(partial(uneven, max_packs=80), world_size).packs())
    assert tools.full(together) == whole and len(together) == 80


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shards", [1, 4])
def test_documents_of_an_epoch_are_packed_before_those_of_the_next(jsonl, shards, mixed):
    """The pool could hold the documents of ten epochs."""
    lengths = np.random.default_rng(0).integers(2, 20, 80).tolist()
    rows = [[n + 1] * length for n, length in enumerate(lengths)]
    source = jsonl(rows[:60]) if mixed else jsonl(rows)
    source = [(source, 3), (jsonl(rows[60:], "other.jsonl"), 1)] if mixed else source

    def of_each_shard(epochs, packs=None):
        options = {**STREAM, "shards": shards, "pool": 1024, "epochs": epochs}
        options["stopping_strategy"] = "all_exhausted_without_replacement"
        found = list(itertools.islice(PackedDataset(source, **options), packs))
        return [documents(p for p in found if p.index % shards == n) for n in range(shards)]

    epoch = of_each_shard(epochs=1)
    assert sorted(itertools.chain(*epoch)) == list(range(1, 81))
    for once, endless in zip(epoch, of_each_shard(None, 40 * shards), strict=True):
        assert len(endless) > 1.3 * len(once)
        for start in range(0, len(endless), len(once)):
            part = endless[start : start + len(once)]
            assert len(set(part)) == len(part) and set(part) <= set(once)


def test_one_epoch_of_packs_has_every_document_once(jsonl):
    """800 rows of 8 shards that are equally long: nothing of the next epoch is in it."""
    path = jsonl([[100 + n] * 8 for n in range(800)])
    options = {"budget": 64, "shards": 8, "pretokenize": False}
    packs = len(list(PackedDataset(path, **options)))
    endless = itertools.islice(PackedDataset(path, epochs=None, **options), packs)
    assert sorted(documents(endless)) == list(range(100, 900))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_the_report_of_a_stream_is_of_the_packs_that_were_trained(tools, jsonl, workers, overflow):
    rows = [row.tolist() if n % 9 else [] for n, row in enumerate(tools.documents(300))]
    path = jsonl(rows)

    def build():
        return PackedDataset(path, overflow=overflow, on_error="skip", epochs=None, **STREAM)

    data, seen = build(), []
    for pack in DataLoader(data, batch_size=None, num_workers=workers):
        data.mark_trained(pack)
        seen.append(pack)
        if len(seen) == 37:
            break
    report = data.report()
    assert report["packs"] == 37
    assert report["packed_tokens"] == sum(len(pack.tokens) for pack in seen)
    assert report["fill"] == pytest.approx(report["packed_tokens"] / (37 * 32))
    begun = {(pack.index % SHARDS, n) for pack in seen for n in pack.samples.tolist()}
    if overflow == "split":  # another part than the first may come first
        assert report["items"] <= len(begun)
    else:
        assert report["items"] == len(begun) + report["dropped"]
    lost = report["truncated_tokens"] + report["dropped_tokens"]
    assert report["tokens"] == report["packed_tokens"] + lost
    assert (report["split"], report["truncated"], report["dropped"]).count(0) == 2
    assert report["shares"] == [1.0] and report["skipped"]["rows"] > 0

    again = build()
    again.load_state_dict(saved(data))
    assert {**again.report(), "skipped": report["skipped"]} == report
    packs = iter(again)
    for _ in range(5):
        again.mark_trained(next(packs))
    assert again.report()["packs"] == 42


def test_what_is_read_and_not_marked_is_reported_without_what_is_pending(jsonl, tools):
    data = PackedDataset(jsonl(tools.documents(300)), **STREAM)
    packs = list(itertools.islice(data, 11))
    assert data.report()["packs"] == 11
    assert data.report()["packed_tokens"] == sum(len(pack.tokens) for pack in packs)
