"""A state of other data, other settings or another version is rejected, and the field is named."""

import copy
import json
import zlib
from base64 import b64encode

import datasets
import numpy as np
import pytest
import torch
from char_tokenizer import tokenize_chars
from nopad.packing import PackedDataset
from nopad.packing.readers.shard_reader import compress_state, decompress_state
from nopad.packing.state import merge_states

ROWS = [np.arange(3 + i % 7) + i for i in range(60)]


def shifted(text):
    return [(ord(letter) + 1) % 128 for letter in text]


BASE = {"budget": 32, "pool": 8, "seed": 1, "tokenizer": tokenize_chars, "add_eos": 127}
CHANGES = {
    "budget": {"budget": 64},
    "pool": {"pool": 16},
    "seed": {"seed": 2},
    "strategy": {"strategy": "sequential"},
    "overflow": {"overflow": "truncate"},
    "pad_to_multiple_of": {"pad_to_multiple_of": 2},
    "shuffle": {"shuffle": False},
    "balance": {"balance": True},
    "continue_positions": {"continue_positions": True},
    "on_error": {"on_error": "skip"},
    "tokenizer": {"tokenizer": shifted},
    "add_eos": {"add_eos": 126},
    "text_column": {"text_column": "content"},
    "shards": {"pretokenize": False, "shards": 4},
}


def state_of(source=ROWS, **options):
    data = PackedDataset(source, **{**BASE, **options})
    packs = iter(data)
    for _ in range(3):
        next(packs)
    return json.loads(json.dumps(data.state_dict()))


@pytest.mark.parametrize("field", CHANGES)
def test_another_setting_is_refused_by_name(field):
    with pytest.raises(ValueError, match=rf"made with {field}="):
        PackedDataset(ROWS, **{**BASE, **CHANGES[field]}).load_state_dict(state_of())


@pytest.mark.parametrize("shuffle, shards", [(8, 4), (16, 2)])
def test_another_window_or_number_of_shards_is_refused_by_name(shuffle, shards):
    state = state_of(lambda: iter(ROWS), shards=4, shuffle=16)
    other = PackedDataset(lambda: iter(ROWS), **BASE, shards=shards, shuffle=shuffle)
    with pytest.raises(ValueError, match=r"made with (shuffle|shards)="):
        other.load_state_dict(state)


def test_another_vocabulary_that_skips_other_rows_is_refused():
    def make(vocab_size):
        options = {"pretokenize": False, "on_error": "skip", "vocab_size": vocab_size}
        return PackedDataset(ROWS, budget=32, **options)

    with pytest.raises(ValueError, match="made with vocab_size=100, this dataset has vocab_size=9"):
        make(9).load_state_dict(make(100).state_dict())


def test_another_mixture_is_refused_by_name():
    state = state_of([(ROWS, 1), (ROWS, 2)])
    with pytest.raises(ValueError, match="made with weights="):
        PackedDataset([(ROWS, 1), (ROWS, 3)], **BASE).load_state_dict(state)
    with pytest.raises(ValueError, match="made with stopping_strategy="):
        PackedDataset(
            [(ROWS, 1), (ROWS, 2)], **BASE, stopping_strategy="all_exhausted_without_replacement"
        ).load_state_dict(state)


def change_one(rows):
    changed = [row.copy() for row in rows]
    changed[17][1] += 1
    return changed


@pytest.mark.smoke("refusals")
@pytest.mark.parametrize("rows", [ROWS[:-1], [*ROWS, ROWS[0]], change_one(ROWS), ROWS[::-1]])
def test_other_data_is_refused(rows):
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(rows, **BASE).load_state_dict(state_of())


def long_rows(kind, value=7):
    """Rows whose `str` would abbreviate their middle."""
    rows = [np.arange(1, 2001) for _ in range(8)]
    rows[3][1000] = value
    if kind == "tensors":
        return [{"input_ids": torch.from_numpy(row)} for row in rows]
    if kind == "streamed":
        table = {"input_ids": [row.tolist() for row in rows]}
        return datasets.Dataset.from_dict(table).to_iterable_dataset()
    return [{"input_ids": row} for row in rows]


@pytest.mark.parametrize("kind", ["arrays", "tensors", "streamed"])
def test_another_token_in_the_middle_of_a_row_is_refused(kind):
    options = {"pretokenize": False, "shards": 1, "shuffle": False}
    state = state_of(long_rows(kind), **options)
    PackedDataset(long_rows(kind), **BASE, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(long_rows(kind, 9), **BASE, **options).load_state_dict(state)


def test_a_function_is_known_by_all_of_its_first_row():
    rows, other = long_rows("arrays")[3:], long_rows("arrays", 9)[3:]
    state = state_of(lambda: iter(rows))
    PackedDataset(lambda: iter([*rows, rows[0]]), **BASE).load_state_dict(state)
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(lambda: iter(other), **BASE).load_state_dict(state)


def test_a_changed_file_is_refused(jsonl):
    path = jsonl(ROWS)
    state = state_of(path, pretokenize=False, shards=2)
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(path, **BASE, pretokenize=False, shards=2).load_state_dict(state)


MALFORMED = {
    "no dict": lambda s: [1],
    "no version": lambda s: {k: v for k, v in s.items() if k != "version"},
    "older version": lambda s: {**s, "version": s["version"] - 1},
    "newer version": lambda s: {**s, "version": s["version"] + 1},
    "version as text": lambda s: {**s, "version": "3"},
    "unknown field": lambda s: {**s, "path": "/etc/passwd"},
    "no position": lambda s: {k: v for k, v in s.items() if k != "position"},
    "settings as list": lambda s: {**s, "settings": []},
    "position short": lambda s: {**s, "position": {"epoch": 0}},
    "index negative": lambda s: {**s, "position": {**s["position"], "index": -1}},
    "index text": lambda s: {**s, "position": {**s["position"], "index": "3"}},
    "index bool": lambda s: {**s, "position": {**s["position"], "index": True}},
    "epoch float": lambda s: {**s, "position": {**s["position"], "epoch": 0.5}},
    "epochs text": lambda s: {**s, "epochs": "1"},
    "epochs none": lambda s: {**s, "epochs": None},
    "epochs beyond": lambda s: {**s, "epochs": 2},
    "no epochs": lambda s: {k: v for k, v in s.items() if k != "epochs"},
    "extra in position": lambda s: {**s, "position": {**s["position"], "file": "x"}},
}


def test_a_stream_with_another_number_of_epochs_is_refused_naming_both():
    state = state_of(lambda: iter(ROWS), shards=2, epochs=2)
    other = PackedDataset(lambda: iter(ROWS), **BASE, shards=2, epochs=3)
    with pytest.raises(ValueError, match=r"made with epochs=2, this stream has epochs=3"):
        other.load_state_dict(state)


def test_a_state_beyond_the_datasets_epochs_is_refused_naming_both():
    data = PackedDataset(ROWS, **BASE, epochs=3)
    assert len(list(data)) == sum(map(data.count, range(3)))
    with pytest.raises(ValueError, match=r"epochs=3 and is in epoch 2, .* has epochs=2"):
        PackedDataset(ROWS, **BASE, epochs=2).load_state_dict(data.state_dict())


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_state_is_refused(name):
    state = MALFORMED[name](copy.deepcopy(state_of()))
    with pytest.raises(ValueError, match="state"):
        PackedDataset(ROWS, **BASE).load_state_dict(state)


def stream():
    return PackedDataset(lambda: iter(ROWS), **BASE, shards=2)


BOMB = b64encode(zlib.compress(b'{"packer": "' + b"0" * (9 << 20) + b'"}')).decode()
BAD_SHARDS = {
    "no dict": lambda s: [],
    "name no number": lambda s: {"../0": s["0"]},
    "beyond the shards": lambda s: {**s, "7": s["0"]},
    "no packs_since": lambda s: {**s, "0": {"state": s["0"]["state"]}},
    "packs_since negative": lambda s: {**s, "0": {**s["0"], "packs_since": -1}},
    "state no text": lambda s: {**s, "0": {**s["0"], "state": 5}},
    "state no base64": lambda s: {**s, "0": {**s["0"], "state": "!!"}},
    "state not packed": lambda s: {**s, "0": {**s["0"], "state": "YWJj"}},
    "state none": lambda s: {**s, "0": {**s["0"], "state": compress_state({"x": 1})}},
    "packed_tokens no numbers": lambda s: {**s, "0": {**s["0"], "packed_tokens": [-1, "x"]}},
    "packed_tokens of other sources": lambda s: {**s, "0": {**s["0"], "packed_tokens": [1, 2]}},
    "no packed_tokens": lambda s: {**s, "0": {**s["0"], "packed_tokens": None}},
    "no counts": lambda s: {**s, "0": {**s["0"], "counts": []}},
    "skipped negative": lambda s: {**s, "0": {**s["0"], "skipped": -1}},
    "a bomb": lambda s: {**s, "0": {**s["0"], "state": BOMB}},
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_malformed_shard_is_refused(name):
    data = stream()
    packs = iter(data)
    for _ in range(4):
        next(packs)
    state = json.loads(json.dumps(data.state_dict()))
    state["shards"] = BAD_SHARDS[name](state["shards"])
    again = stream()
    with pytest.raises(ValueError, match="shard"):
        again.load_state_dict(state)
        next(iter(again))


def test_a_pass_that_does_not_say_what_its_packs_held_is_not_gone_on_from():
    drift = [(ROWS, [(0, 1.0), (99, 0.5)]), (ROWS, 1)]

    def make():
        return PackedDataset(drift, **BASE, pretokenize=False, shards=2)

    data = make()
    list(data)
    state = json.loads(json.dumps(data.state_dict()))
    assert state["finished"]
    for cursor in state["shards"].values():
        cursor["packed_tokens"] = [7]
    again = make()
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="lacks the tokens of its packs"):
        list(again)


def test_a_state_of_one_rank_alone_does_not_continue_the_others():
    def rank(number):
        return PackedDataset(
            lambda: iter(ROWS), **BASE, shards=2, epochs=None, rank=number, world_size=2
        )

    both = [rank(0), rank(1)]
    for data in both:
        packs = iter(data)
        next(packs), next(packs)
    again = rank(1)
    again.load_state_dict(both[0].state_dict())
    with pytest.raises(ValueError, match="merge_states"):
        next(iter(again))
    again.load_state_dict(merge_states([data.state_dict() for data in both]))
    next(iter(again))


def test_a_shards_state_survives_its_short_text():
    assert decompress_state(compress_state({"packer": [1, 2]})) == {"packer": [1, 2]}


FAR = 10**18


@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize(
    "change", [{"index": FAR}, {"index": 10**9}, {"epoch": FAR}, {"epoch_start": 10**9}]
)
def test_a_position_beyond_the_run_is_refused_at_once(epochs, change):
    state = state_of(epochs=epochs)
    state["position"] |= change
    data = PackedDataset(ROWS, **BASE, epochs=epochs)
    with pytest.raises(ValueError, match=r"beyond any run|contradict each other|not made by this"):
        data.load_state_dict(state)
        next(iter(data))


@pytest.mark.parametrize("change", [{"num_packs": FAR}, {"num_packs": 10**9}, {"epoch": FAR}, {}])
def test_a_workers_position_beyond_the_run_is_refused_at_once(change, monkeypatch):
    worker = {"id": 0, "num_workers": 1, "num_packs": 1, "epoch": 0, "epoch_start": 0} | change
    if not change:
        del worker["epoch"]
    state = {**state_of(epochs=None), "worker": worker}
    data = PackedDataset(ROWS, **BASE, epochs=None)
    info = type("Info", (), {"id": 0, "num_workers": 1})
    monkeypatch.setattr("nopad.packing.dataset.get_worker_info", lambda: info)
    with pytest.raises(ValueError, match=r"the state's worker|not made by this run"):
        data.load_state_dict(state)
        next(iter(data))


@pytest.mark.parametrize("field", ["packs_since", "epoch"])
@pytest.mark.parametrize("epochs", [1, None])
def test_a_shard_beyond_its_feed_is_refused_at_once(field, epochs):
    options = {"shards": 1, "shuffle": 4, "pretokenize": False, "epochs": epochs}
    state = state_of(lambda: iter(ROWS * 40), **options)
    cursor = state["shards"]["0"]
    if field == "epoch" and epochs:
        inner = decompress_state(cursor["state"])
        cursor["state"] = compress_state({**inner, "epoch": FAR})
    else:
        cursor["packs_since"] = FAR
    data = PackedDataset(lambda: iter(ROWS * 40), **BASE, **options)
    data.load_state_dict(state)
    with pytest.raises(ValueError, match=r"shard 0 (ends before the position|is in epoch)"):
        next(iter(data))


def test_a_file_that_changes_after_it_was_opened_is_refused_on_resume(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:04}"}) + "\n" for i in range(40)))
    options = {**BASE, "pretokenize": False, "shards": 2}
    data = PackedDataset(path, **options)
    path.write_text(path.read_text().replace("0039", "0038"))
    state = data.state_dict()
    with pytest.raises(ValueError, match="made with other data"):
        PackedDataset(path, **options).load_state_dict(state)


def test_an_iterable_is_not_read_when_it_is_opened():
    calls = []
    PackedDataset(lambda: calls.append(1) or iter(ROWS), **{**BASE, "shards": 1})
    assert calls == []
