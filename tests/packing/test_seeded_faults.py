"""Tests of the tests: faults seeded into the packer, its order, sources and state are all caught.

Each fault is a small, plausible mistake, put in place of the real code. One probe, the same
checks that the other tests make, must fail on every one of them and pass without any.
"""

import json
from itertools import chain

import datasets
import numpy as np
import pytest
from nopad.packing import PackedDataset, Sample, dataset, token_ids
from nopad.packing import sample as sample_module
from nopad.packing.encoding import Encoder
from nopad.packing.encoding import encoder as encoder_module
from nopad.packing.ordering import Mixture, RankShare, shuffle_key
from nopad.packing.planning import Plan, packer
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
            token_ids.make_sample(bad)
    with pytest.raises(ValueError):
        token_ids.make_sample([1, 9], None, 9)
    with pytest.raises(ValueError):
        token_ids.make_sample([1, 2], [1])
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
        token_ids.make_sample([1, 2, 3], [2, 3, -100])
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


def no_check(*args, **kwargs):
    return None


FAULTS = {
    "a worker's share starts one pack late": (
        RankShare, "first", lambda self, base: base + (self.rank - base) % self.world_size
        + self.worker * self.world_size + 1),
    "workers of a rank repeat each other": (
        RankShare, "first", lambda self, base: base + (self.rank - base) % self.world_size),
    "the stride forgets the workers": (RankShare, "stride", property(lambda self: self.world_size)),
    "a round ends with its first pack": (
        RankShare, "round_end", lambda self, index, base: index + 1),
    "a round is counted from 0, not from the base": (
        RankShare, "round_start", lambda self, index, base: index - index % self.world_size + 1),
    "ranks are dealt from the base": (
        RankShare, "first", lambda self, base: base + self.rank + self.worker * self.world_size
        + (0 if base % 3 else self.world_size)),
    "the epoch is not in the key": (planned, "epoch_order", lambda n, seed, epoch, shuffle:
                                    epoch_order(n, seed, 0, shuffle)),
    "a block's key forgets the lap": (
        shuffled_rows, "shuffle_key", lambda *parts: shuffle_key(*parts[-3:])),
    "the last document of a block is lost": (
        planned, "epoch_order", lambda *a: (block[:-1] for block in epoch_order(*a))),
    "labels are not masked at the head of a sequence": (
        token_store.TokenStore, "gather", lambda *a, **k:
            (rows := gather(*a, **k))._replace(labels=rows.tokens.copy())),
    "a part's start is forgotten": (
        token_store.TokenStore, "gather", lambda self, plan, *a, **k: gather(
            self, Plan(plan.items, plan.starts * 0, plan.lengths, plan.offsets), *a, **k)),
    "boundaries count from the row, not the pack": (
        token_store.TokenStore, "gather", lambda *a, **k: from_the_row(gather(*a, **k))),
    "a finished sample is kept by the packer": (
        packer.Packer, "add", lambda self, samples: keep_finished(self, list(samples))),
    "a packer's state forgets the planner": (
        packer.Packer, "load_state_dict", lambda self, state, samples:
            self.pending.update(samples)),
    "a packer's split samples wait for all their tokens again": (
        packer.Packer, "state_dict", lambda self: {
            "planner": self.planner.state_dict(),
            "pending_tokens": [[n, 1] for n in self.pending]}),
    "a resume forgets the packs since the snapshot": (
        shard_reader.ShardReader, "next_pack", lambda self:
            with_packs_since(next_pack(self), lambda count: 0)),
    "a resume passes over one pack too many": (
        shard_reader.ShardReader, "next_pack", lambda self:
            with_packs_since(next_pack(self), lambda count: count + 1)),
    "a resume repeats a pack": (
        shard_reader.ShardReader, "next_pack", lambda self:
            with_packs_since(next_pack(self), lambda count: max(0, count - 1))),
    "a resumed reader passes over a row": (
        shuffled_rows.ShuffledRows, "restore", lambda self, marks, position, numbers:
            restore(self, marks, position + 1, numbers)),
    "a resumed reader starts its block again": (
        shuffled_rows.ShuffledRows, "restore", lambda self, marks, position, numbers:
            restore(self, marks, marks[-1][0], numbers)),
    "the marks of pending rows are forgotten": (
        shuffled_rows.ShuffledRows, "drop_before", lambda self, needed:
            self.block_marks.__delitem__(slice(0, len(self.block_marks) - 1))),
    "a shard of another rank is read": (
        streamed.StreamedPacks, "read", lambda self, position, share, base, cursors: read_packs(
            self, position, share, base, {s: cursors.get((s + 2) % 4, c)
                                          for s, c in cursors.items()})),
    "progress counts the last pack as not done": (
        progress.Progress, "next_position", lambda self, share: self.position),
    "progress keeps the first cursor of a shard": (
        progress.Progress, "add", lambda self, index, cursor: keep_first(self, index, cursor)),
    "settings are not compared": (
        dataset, "check_state", lambda state, settings, *rest:
            check_state({**state, "settings": settings}, settings, *rest)),
    "positions are not checked": (
        dataset, "check_state", lambda state, *rest:
            check_state({**state, "position": {**state["position"], "index": 0}}, *rest)),
    "data is not compared": (planned.TokenStore, "fingerprint", lambda self: "other"),
    "the version is not compared": (run_state, "VERSION", run_state.VERSION + 1),
    "the checksum is not compared": (state_file, "encode_state", lambda state: json.dumps(
        {"state": state}).encode()),
    "the state before is not kept": (
        state_file, "write_state", lambda path, state: write_without_previous(path, state)),
    "a torn state pushes out the good one": (
        state_file, "write_state", lambda path, state: write_after_copy(path, state)),
    "ids are rounded": (
        token_ids, "validate_token_ids", lambda ids, name="":
            np.asarray(ids, np.float64).astype(np.int64)),
    "ids beyond the vocabulary pass": (
        token_ids, "make_sample", lambda ids, labels=None, vocab_size=None:
            make_sample(ids, labels)),
    "a packed row is one document": (
        hf_datasets, "inner_starts", lambda columns, lengths: np.zeros(0, np.int64)),
    "a packed row passes the encoder": (encoder_module, "check_not_packed", no_check),
    "shifted labels pass": (sample_module, "check_labels", no_check),
    "a mask of the loss is ignored": (encoder_module, "check_masks", no_check),
    "text beside a prompt wins": (
        Encoder, "encode", lambda self, rows: encode(
            self, [{"text": row["text"]} if "text" in row else row for row in rows])),
    "the end mark is forgotten": (
        Encoder, "__init__", lambda self, *a, add_eos=True, **k:
            begin_encoder(self, *a, add_eos=False, **k)),
    "a key that stands twice passes": (
        jsonl_module.JsonlSource, "read", lambda *a, **k: (
            row._replace(value={"a": 2}) if "twice" in str(row.value) else row
            for row in read_rows(*a, **k))),
    "lines at a shard's border are read twice": (
        jsonl_module.JsonlSource, "read", lambda self, shard, shards, *rest: chain(
            list(read_rows(self, shard - 1, shards))[-1:] if shard else (),
            read_rows(self, shard, shards, *rest))),
    "a name may lead out": (paths, "resolve_inside", lambda folder, name: folder / name),
    "a mixture ignores its weights": (
        Mixture, "draw", lambda self, lengths: draw_evenly(self, lengths)),
    "rows known by number forget one batch": (
        IndexedSource, "read", lambda self, *a, **k: iter(())),
}  # fmt: skip

epoch_order = planned.epoch_order
gather = token_store.TokenStore.gather
add_samples = packer.Packer.add
next_pack = shard_reader.ShardReader.next_pack
restore = shuffled_rows.ShuffledRows.restore
read_packs = streamed.StreamedPacks.read
check_state = run_state.check_state
write_state = state_file.write_state
make_sample = token_ids.make_sample
begin_encoder = Encoder.__init__
encode = Encoder.encode
read_rows = jsonl_module.JsonlSource.read
add = progress.Progress.add
draw = Mixture.draw


def from_the_row(rows):
    starts = np.resize(rows.segment_starts, len(rows.cu_seqlens)).astype(np.int32)
    return rows._replace(cu_seqlens=starts)


def keep_finished(self, samples):
    first = self.counts.items
    packs = add_samples(self, samples)
    self.pending.update(enumerate(samples, first))
    return packs


def with_packs_since(pack, change):
    if pack is not None:
        pack.cursor["packs_since"] = change(pack.cursor["packs_since"])
    return pack


def write_without_previous(path, state):
    write_state(path, state)
    previous_of(path).unlink(missing_ok=True)


def write_after_copy(path, state):
    if path.exists():
        previous_of(path).write_bytes(path.read_bytes())
    write_state(path, state)


def previous_of(path):
    return path.with_name(f"{path.name}.previous")


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
