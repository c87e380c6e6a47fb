"""PackedDataset: counts, settings, and data that cannot be packed."""

import json
import subprocess
import sys

import numpy as np
import pytest
from nopad.packing import PackedDataset, Sample
from nopad.packing.readers import estimate_report
from nopad.packing.sources import TokenArray, TokenStore

pytestmark = pytest.mark.filterwarnings("ignore")


def test_importing_packing_does_not_import_torch():
    program = "import sys, nopad.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.smoke("order")
def test_every_document_is_in_an_epoch_exactly_once(make, tools):
    rows = sorted(row.tolist() for row in tools.documents(400))
    for kind in ("planned", "sharded"):
        found = []
        for pack in make(kind):
            parts = np.split(pack.tokens, pack.cu_seqlens[1:-1])
            found += [part.tolist() for part in parts if len(part)]
        assert sorted(found) == rows


def test_the_packs_of_an_epoch_are_counted_without_reading_tokens(make):
    assert make("planned").count() == len(list(make("planned")))
    with pytest.raises(ValueError, match=r"cannot be counted .* pretokenize=True .* estimate\(\)"):
        make("sharded").count()
    assert make("sharded", pretokenize=True).count() > 0


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_the_packs_of_an_epoch_are_estimated_from_its_first_documents(overflow):
    rows = [[1] * n for n in [50, 500] * 400]
    data = PackedDataset(rows, budget=100, overflow=overflow)
    estimated = estimate_report(data.reader, max_documents=100)["epoch_packs"]
    assert abs(estimated - data.count()) <= 0.05 * data.count()


def test_the_packs_of_a_stream_are_estimated_from_its_first_rows(make):
    exact = len([pack for pack in make("sharded") if len(pack.tokens)])
    assert abs(make("sharded").estimate() - exact) <= 0.1 * exact
    assert make("planned").estimate() == make("planned").count()
    endless = PackedDataset(lambda: iter([[1]]), budget=8)
    assert endless.estimate() is None
    skipped = {"overflow": "error", "on_error": "skip", "pretokenize": False, "shards": 1}
    assert PackedDataset([[1] * 9, [1] * 8, [1] * 4], budget=8, **skipped).estimate() == 2


def test_a_tokenizer_may_know_a_few_letters_only():
    letters = {letter: number for number, letter in enumerate("abc")}
    data = PackedDataset(
        ["abc", "cab"], tokenizer=lambda text: [letters[x] for x in text], budget=8
    )
    assert sorted(next(iter(data)).tokens.tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([], {}),
        ([[1, 2, 3] * 9], {"overflow": "drop"}),
        ([[1.5, 2.0]], {"on_error": "skip"}),
    ],
    ids=["no rows", "all dropped", "all left out"],
)
@pytest.mark.parametrize("end", [{"epochs": 2}, {"epochs": 2, "max_packs": 5}, {"epochs": None}])
def test_a_stream_with_nothing_to_pack_is_refused(rows, options, end):
    data = PackedDataset(lambda: iter(rows), budget=8, shards=2, **options, **end)
    with pytest.raises(ValueError, match="nothing to pack"):
        list(data)


def test_a_shard_without_rows_is_refused_where_there_is_no_end():
    data = PackedDataset(lambda: iter([[1, 2, 3]]), budget=8, shards=2, epochs=None, pool=1)
    with pytest.raises(ValueError, match="shard 1 of 2 has nothing to pack"):
        list(data)
    data = PackedDataset(lambda: iter([[1, 2, 3]]), budget=8, shards=2, pool=1)
    assert [pack.tokens.tolist() for pack in data] == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 1}, "rank=1 and world_size=None: pass both"),
        ({"world_size": 2}, "rank=None and world_size=2: pass both"),
        ({"shards": 0}, "shards=0: pass at least 1"),
        ({"shuffle": -1}, "shuffle=-1: pass True, False, or a number"),
        ({"shuffle": 2.5}, "shuffle=2.5: pass True"),
        ({"shuffle": None}, "shuffle=None: pass True"),
        ({"pad_token_id": -5}, "pad_token_id=-5: pass an id"),
        ({"pad_token_id": 10, "vocab_size": 10}, "pad_token_id=10: pass .* from 0 to 9"),
        ({"vocab_size": 0}, "vocab_size=0: pass at least 1"),
        ({"vocab_size": "10"}, "vocab_size '10' must be an integer"),
        ({"budget": 8.0}, "budget 8.0 must be an integer"),
        ({"pool": 1.5}, "pool 1.5 must be an integer"),
        ({"seed": None}, "seed None must be an integer"),
        ({"epochs": 1.5}, "epochs 1.5 must be an integer"),
        ({"max_packs": 2.5}, "packs 2.5 must be an integer"),
        ({"shards": 2.0}, "shards 2.0 must be an integer"),
        ({"strategy": "x"}, "strategy 'x': choose"),
        ({"overflow": "x"}, "overflow 'x': choose"),
        ({"strategy": "concat", "overflow": "drop"}, "concat always splits"),
        ({"pad_to_multiple_of": 16}, "pad_to_multiple_of 16 must be"),
        ({"stopping_strategy": "x"}, "stopping_strategy='x': choose"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2 ranks"),
        ({"rank": 0.0, "world_size": 1}, "rank 0.0 must be an integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name_when_it_is_opened(options, told):
    with pytest.raises(ValueError, match=told):
        PackedDataset([[1, 2, 3]], **{"budget": 8, **options})


@pytest.mark.parametrize("weight", [-1, float("nan"), [(0, "a")], [0.5, 0.2], [(0, 1, 2)], [], 0])
def test_weights_that_make_no_sense_are_refused_when_it_is_opened(weight):
    with pytest.raises(ValueError, match="the weight"):
        PackedDataset([([[1, 2, 3]], weight)], budget=8)


def test_settings_of_numpy_are_the_same_settings(tools):
    rows = tools.documents(60)
    own = PackedDataset(rows, budget=64, seed=3, pool=8)
    theirs = PackedDataset(rows, budget=np.int64(64), seed=np.int32(3), pool=np.uint8(8))
    assert [tools.digest(p) for p in theirs] == [tools.digest(p) for p in own]
    assert json.dumps(theirs.state_dict()) == json.dumps(own.state_dict())


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("planned", [True, False])
def test_a_sequence_may_be_shorter_than_a_pack(planned, overflow):
    rows = [[n] * (4 * n) for n in range(1, 9)]
    options = {"budget": 64, "overflow": overflow, "pretokenize": planned, "shards": 1}
    data = PackedDataset(rows, max_length=10, **options)
    lengths = sorted(length for pack in data for length in pack.lengths.tolist())
    wanted = {"drop": [4, 8], "truncate": [4, 8, *[10] * 6]}
    wanted["split"] = [2, 2, 4, 4, 6, 8, 8, *[10] * 11]
    assert lengths == wanted[overflow]
    report = data.report()
    name = {"split": "split", "truncate": "truncated", "drop": "dropped"}[overflow]
    assert report[name] == 6 and report["packs"] < 8
    with pytest.raises(ValueError, match="max_length=10, this dataset has max_length=None"):
        PackedDataset(rows, **options).load_state_dict(data.state_dict())


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_length_is_that_of_a_pass_on_one_rank(tools, world_size):
    rows = tools.documents(60)
    for settings in ({}, {"epochs": 2}, {"epochs": None, "max_packs": 7}, {"max_packs": 4}):
        options = {"budget": 90, "rank": 0, "world_size": world_size, **settings}
        data = PackedDataset(rows, **options)
        for _ in range(2):
            assert len(data) == len(list(data))
            data.start_next_pass()


def test_a_length_that_is_not_known_is_a_type_error_with_the_way_out():
    stream = PackedDataset(lambda: iter([[1, 2]]), budget=8)
    with pytest.raises(TypeError, match=r"cannot be counted.*pretokenize=True, or call estimate"):
        len(stream)
    with pytest.raises(TypeError, match="with epochs=None the data has no end"):
        len(PackedDataset([[1, 2]], budget=8, epochs=None))
    assert stream and PackedDataset([], budget=8)


def test_positions_may_not_continue_beyond_the_longest_sequence():
    with pytest.raises(ValueError, match="continue_positions=True would continue positions beyond"):
        PackedDataset([[1, 2]], budget=8, max_length=4, continue_positions=True)
    with pytest.raises(ValueError, match="max_length 1: a sequence needs 2 tokens"):
        PackedDataset([[1, 2]], budget=8, max_length=1)


@pytest.mark.parametrize("skip", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["list", "file", "store", "stream of a list", "stream of a file"])
def test_a_document_that_is_too_long_is_named_by_its_own_place(jsonl, kind, skip):
    rows = [[1] * 3 for _ in range(50)]
    rows[37] = [1] * 100
    options = {"budget": 8, "overflow": "error", "on_error": skip}
    if "stream" in kind:
        options |= {"pretokenize": False, "shards": 2}
    source, place = rows, "list, row 37"
    if "file" in kind:
        source, place = jsonl(rows), "rows.jsonl, line 38"
    if kind == "store":
        samples = [Sample(np.array(row)) for row in rows]
        arrays = [TokenArray.of(samples[:30], "first"), TokenArray.of(samples[30:], "second")]
        source, place = TokenStore(arrays), "second, document 37"
    with pytest.raises(ValueError, match=f"{place} has 100 tokens, at most 8 are allowed: choose"):
        list(PackedDataset(source, **options))
