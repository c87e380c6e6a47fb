"""Tests of the tests: faults seeded into the packer, its order, sources and state are all caught.

Each fault is a small, plausible mistake, put in place of the real code. One probe, the same
checks that the other tests make, must fail on every one of them and pass without any.
"""

import json

import datasets
import numpy as np
import pytest
from nopad.packing import PackedDataset, Sample, make_sample, validate_token_ids
from nopad.packing import sample as sample_module
from nopad.packing.encoding import Encoder
from nopad.packing.encoding import encoder as encoder_module
from nopad.packing.ordering import Mixture, RankShard, shuffle_key
from nopad.packing.planning import packer
from nopad.packing.readers import planned, shard_reader, shuffled_rows, streamed
from nopad.packing.sources import hf_datasets, paths, token_store
from nopad.packing.sources import jsonl as jsonl_module
from nopad.packing.sources.indexed_source import IndexedSource
from nopad.packing.state import progress, run_state, state_file

BUDGET = 64


def planned_run(tools, rows):
    def make(rank=0, world_size=1):
        return PackedDataset(
            rows, budget=BUDGET, pool=8, epochs=2, rank=rank, world_size=world_size
        )

    return make


def sharded_run(tools, path):
    def make(rank=0, world_size=1):
        return PackedDataset(
            path, budget=BUDGET, pool=6, shards=4, shuffle=8, pretokenize=False, epochs=None,
            max_packs=40, rank=rank, world_size=world_size,
        )  # fmt: skip

    return make


def check_content(make, rows, epochs):
    """Every document is complete and once per epoch, with its labels, within the budget."""
    found = []
    for pack in make():
        assert len(pack.tokens) <= BUDGET and pack.cu_seqlens[-1] == len(pack.tokens)
        assert not pack.first_positions.any()
        for a, b in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False):
            assert pack.labels[a] == -100
            assert (pack.labels[a + 1 : b] == pack.tokens[a + 1 : b]).all()
            found.append(tuple(pack.tokens[a:b].tolist()))
    if epochs:
        parts = [tuple(r[i : i + BUDGET].tolist()) for r in rows for i in range(0, len(r), BUDGET)]
        assert sorted(found) == sorted(parts * epochs)
        assert found[: len(parts)] != found[len(parts) :], "both epochs have one order"


def check_views(tools, make):
    """Ranks, workers and restarts are views of one sequence."""
    alone = [tools.digest(pack) for pack in make()]
    for world_size, workers in ((2, 1), (1, 2)):
        run = tools.Run(make, world_size, workers)
        packs, states = [], {}
        for number, pack in enumerate(run.packs(), 1):
            packs.append(tools.digest(pack))
            if number in (2, 14, 26):
                states[number] = run.saved()
        assert packs[: len(alone)] == alone
        for stop, saved in states.items():
            for topology in ((1, 1), (2, 1)):
                rest = tools.Run(make, *topology).load(saved).packs()
                rest = [tools.digest(pack) for pack in rest]
                assert (packs[:stop] + rest)[: len(alone)] == alone


def check_states(make, tmp_path):
    """A wrong state is rejected, a corrupted file detected."""
    data = make()
    packs = iter(data)
    next(packs)
    state = json.loads(json.dumps(data.state_dict()))
    for change in (
        {"version": state["version"] + 1},
        {"fingerprint": "other"},
        {"settings": {**state["settings"], "seed": 9}},
        {"position": {**state["position"], "index": -1}},
    ):
        with pytest.raises(ValueError):
            make().load_state_dict({**state, **change})
    path = tmp_path / "state.json"
    state_file.write_state(path, {"old": 1})
    state_file.write_state(path, state)
    text = path.read_text()
    path.write_text(text.replace('"index":1', '"index":2'))
    assert state_file.read_state(path) == {"old": 1}
    path.write_text(text[:-5])
    state_file.write_state(path, state)
    path.write_text(text[:-5])
    assert state_file.read_state(path) == {"old": 1}


def check_rows(tmp_path):
    """Bad rows are rejected, good ones kept; names stay inside; mixtures follow their weights."""
    for bad in ([], [1.5], [True], [-1], [2**70], [[1]], None):
        with pytest.raises(ValueError):
            make_sample(bad)
    with pytest.raises(ValueError):
        make_sample([1, 9], None, 9)
    with pytest.raises(ValueError):
        make_sample([1, 2], [1])
    encoder = Encoder(lambda text: [ord(letter) for letter in text], add_eos=0)
    assert encoder.encode([{"text": "a"}])[0].tokens.tolist() == [97, 0]
    pair = encoder.encode([{"prompt": "ab", "completion": "c"}])[0]
    assert pair.labels.tolist() == [-100, -100, 99, 0]
    bad = b'{"a": 1, "a": 2}\n{"text": "x"}\n'
    path = tmp_path / "bad.jsonl"
    path.write_bytes(bad)
    values = [row.value for row in jsonl_module.JsonlSource([path]).read(0, 1)]
    assert isinstance(values[0], ValueError) and values[1] == {"text": "x"}
    rows = [row.value for s in range(3) for row in jsonl_module.JsonlSource([path]).read(s, 3)]
    assert len(rows) == 2
    with pytest.raises(ValueError):
        paths.resolve_inside(tmp_path, "../x")
    packed = {"input_ids": [[1, 2, 3], [4, 5]], "seq_lengths": [[1, 2], [2]]}
    store = hf_datasets.token_arrays(datasets.Dataset.from_dict(packed), "x")
    assert store[0].lengths.tolist() == [1, 2, 2]
    with pytest.raises(ValueError):
        make_sample([1, 2, 3], [2, 3, -100])
    masked = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    cut = {"input_ids": [1, 2], "seq_lengths": [1, 1]}
    for row in (masked, cut, {"text": "a", "prompt": "b", "completion": "c"}):
        assert isinstance(encoder.encode([row])[0], ValueError)
    lengths = [np.full(300, 7), np.full(300, 7)]
    choices, _ = Mixture([3, 1]).draw(lengths)
    assert abs((choices == 0).mean() - 0.75) < 0.01


def check_packer():
    """A packer killed while parts of a split sample are pending keeps exactly these parts."""
    samples = [Sample(np.arange(1, n)) for n in (150, 40, 30, 70, 20)]
    first = packer.Packer(BUDGET, pool=4)
    list(first.add(samples))
    second = packer.Packer(BUDGET, pool=4)
    second.load_state_dict(first.state_dict(), dict(first.pending))
    whole = [pack.tokens.tolist() for pack in first.finish()]
    assert [pack.tokens.tolist() for pack in second.finish()] == whole
    assert not first.pending and not second.pending


def check_laps(path):
    """Each lap of a stream has its own order."""
    source = jsonl_module.JsonlSource([path])
    reader = shuffled_rows.ShuffledRows(source, shuffle_block=8)
    laps = []
    for _ in range(2):
        laps.append([])
        while rows := reader.take(100):
            laps[-1] += [str(row.value) for _, row in rows]
        reader.next_lap()
    assert sorted(laps[0]) == sorted(laps[1]) and laps[0] != laps[1]


@pytest.fixture
def probe(tools, jsonl, tmp_path):
    """Return all checks as one function."""
    rows = tools.documents(60, longest=150)
    path = jsonl(rows)
    mixture = [(path, 3), (jsonl(rows[:30], "other.jsonl"), 1)]

    def run():
        plan, stream = planned_run(tools, rows), sharded_run(tools, path)
        one = PackedDataset(
            path, budget=BUDGET, pool=6, shards=2, shuffle=8, pretokenize=False, epochs=2
        )
        check_rows(tmp_path)  # the cheapest first: a fault ends the probe
        check_packer()
        check_laps(path)
        check_states(plan, tmp_path)
        check_content(plan, rows, epochs=2)
        check_content(stream, rows, epochs=None)
        check_content(lambda: one, rows, epochs=2)
        check_views(tools, plan)
        check_views(tools, stream)
        check_views(tools, sharded_run(tools, mixture))

    return run


def without_last(function):
    return lambda *a, **k: function(*a, **k)[:-1]


def no_check(*args, **kwargs):
    return None


def fill_all_labels(*args):
    copy_segments(*args)
    args[-1][:] = args[-2]
    return True


copy_segments = token_store._copy


FAULTS = {
    "a worker's share starts one pack late": (
        RankShard, "first", lambda self, base: base + (self.rank - base) % self.world_size
        + self.worker * self.world_size + 1),
    "workers of a rank repeat each other": (
        RankShard, "first", lambda self, base: base + (self.rank - base) % self.world_size),
    "the stride forgets the workers": (RankShard, "stride", property(lambda self: self.world_size)),
    "a round ends with its first pack": (
        RankShard, "round_end", lambda self, index, base: index + 1),
    "a round is counted from 0, not from the base": (
        RankShard, "round_start", lambda self, index, base: index - index % self.world_size + 1),
    "ranks are dealt from the base": (
        RankShard, "first", lambda self, base: base + self.rank + self.worker * self.world_size
        + (0 if base % 3 else self.world_size)),
    "the epoch is not in the key": (planned, "epoch_order", lambda n, seed, epoch, shuffle:
                                    epoch_order(n, seed, 0, shuffle)),
    "a block's key forgets the lap": (
        shuffled_rows.ShuffledRows,
        "_key",
        lambda self, *parts: shuffle_key(self.seed, self.shard)),
    "the last document of a block is lost": (
        planned, "epoch_order", lambda *a: (block[:-1] for block in epoch_order(*a))),
    "labels are not masked at the head of a sequence": (token_store, "_copy", fill_all_labels),
    "a part's start is forgotten": (
        token_store, "_allocate_rows", lambda items, starts, *rest:
            allocate_rows(items, starts * 0, *rest)),
    "boundaries count from the row, not the pack": (
        token_store, "_allocate_rows", lambda *a: from_the_row(allocate_rows(*a))),
    "a finished sample is kept by the packer": (
        packer.Packer, "_hold", lambda self, number, sample: hold(self, number + 1, sample)),
    "a packer's state forgets the planner": (
        packer.Packer, "load_state_dict", lambda self, state, samples:
            self.pending.update(samples)),
    "a packer's split samples wait for all their tokens again": (
        packer.Packer, "state_dict", lambda self: {
            "planner": self.planner.state_dict(),
            "pending_tokens": [[n, 1] for n in self.pending]}),
    "a shard's snapshot is taken after feeding": (
        shard_reader.ShardReader, "_make_cursor", lambda self: {
            **make_cursor(self), "packs_since": 0, "state": self._take_snapshot()}),
    "a resume passes over one pack too many": (
        shard_reader.ShardReader, "_make_cursor", lambda self: {
            **make_cursor(self), "packs_since": self._packs_since + 1}),
    "a resume repeats a pack": (
        shard_reader.ShardReader, "_make_cursor", lambda self: {
            **make_cursor(self), "packs_since": max(0, self._packs_since - 1)}),
    "rows read ahead count as drawn": (
        shard_reader.ShardReader, "_next_row", lambda self, source: self.rows[source].next_row),
    "a resumed reader starts its block again": (
        shuffled_rows.ShuffledRows, "restore", lambda self, marks, position, numbers:
            restore(self, marks, marks[-1][0], numbers)),
    "the marks of pending rows are forgotten": (
        shuffled_rows.ShuffledRows, "drop_before", lambda self, needed:
            self.block_marks.__delitem__(slice(0, len(self.block_marks) - 1))),
    "a shard of another rank is read": (
        streamed.StreamedPacks, "_open", lambda self, position, share, index, cursors: open_shards(
            self, position, share, index, {s: cursors.get((s + 2) % 4, c)
                                           for s, c in cursors.items()})),
    "progress counts the last pack as not done": (
        progress.Progress, "next_position", lambda self, share: self.position),
    "progress keeps the first cursor of a shard": (
        progress.Progress, "add", lambda self, index, cursor: keep_first(self, index, cursor)),
    "settings are not compared": (run_state, "_check_settings", no_check),
    "positions are not checked": (run_state, "_check_position", no_check),
    "data is not compared": (planned.TokenStore, "fingerprint", lambda self: "other"),
    "the version is not compared": (run_state, "VERSION", run_state.VERSION + 1),
    "the checksum is not compared": (state_file, "encode_state", lambda state: json.dumps(
        {"state": state}).encode()),
    "the state before is not kept": (state_file, "_keep_previous", no_check),
    "a torn state pushes out the good one": (
        state_file, "_is_intact", lambda path: path.exists()),
    "ids are rounded": (
        validate_token_ids.__globals__, "validate_token_ids", lambda ids, name="":
            np.asarray(ids, np.float64).astype(np.int64)),
    "ids beyond the vocabulary pass": (validate_token_ids.__globals__, "_check_range", no_check),
    "a packed row is one document": (
        hf_datasets, "inner_starts", lambda columns, lengths: np.zeros(0, np.int64)),
    "a packed row passes the encoder": (encoder_module, "check_not_packed", no_check),
    "shifted labels pass": (sample_module, "check_labels", no_check),
    "a mask of the loss is ignored": (encoder_module, "check_masks", no_check),
    "text beside a prompt wins": (Encoder, "_check_columns", no_check),
    "the end mark is forgotten": (Encoder, "_append_eos", lambda self, ids: ids),
    "a key that stands twice passes": (
        jsonl_module, "_DECODER", json.JSONDecoder()),
    "lines at a shard's border are read twice": (
        jsonl_module, "_line_start", lambda file, begin: begin),
    "a name may lead out": (paths, "resolve_inside", lambda folder, name: folder / name),
    "a mixture ignores its weights": (
        Mixture, "draw", lambda self, lengths: draw_evenly(self, lengths)),
    "rows known by number forget one batch": (
        IndexedSource, "read", lambda self, *a, **k: iter(())),
}  # fmt: skip

epoch_order = planned.epoch_order
allocate_rows = token_store._allocate_rows


def from_the_row(columns):
    columns = list(columns)
    columns[2] = np.resize(columns[-1], len(columns[2])).astype(np.int32)
    return tuple(columns)


hold = packer.Packer._hold
make_cursor = shard_reader.ShardReader._make_cursor
restore = shuffled_rows.ShuffledRows.restore
open_shards = streamed.StreamedPacks._open
add = progress.Progress.add
draw = Mixture.draw


def keep_first(self, index, cursor):
    shard_number = cursor.get("shard")
    before = self.cursors.get(shard_number)
    add(self, index, cursor)
    if before is not None:
        self.cursors[shard_number] = before


def draw_evenly(self, lengths):
    self.fractions[:] = self.fractions.mean()
    return draw(self, lengths)


def test_without_a_fault_the_probe_passes(probe):
    probe()


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_caught(probe, monkeypatch, name):
    target, attribute, fault = FAULTS[name]
    if isinstance(target, dict):
        monkeypatch.setitem(target, attribute, fault)
    else:
        monkeypatch.setattr(target, attribute, fault)
    with pytest.raises(
        (AssertionError, ValueError, KeyError, IndexError, TypeError, pytest.fail.Exception)
    ):
        probe()
