"""Mixtures: token shares follow the weights at every moment, and sources end by their strategy."""

import json
from itertools import islice
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nopad.packing import PackedDataset
from nopad.packing.ordering import Mixture
from nopad.packing.ordering.mixture import (
    SCALE,
    MixedOrder,
    StoppingStrategy,
    parse_mixture,
    source_names,
)


def drawn_tokens(choices, lengths):
    taken, shares = [0] * len(lengths), []
    following = [iter(own) for own in lengths]
    for source in choices.tolist():
        taken[source] += int(next(following[source]))
        shares.append(list(taken))
    return np.array(shares)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 2**30))
def test_the_shares_are_right_to_within_a_document_at_any_moment(weights, seed):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 100, 400) for _ in weights]
    choices, needed = Mixture(weights).draw(lengths)
    taken = drawn_tokens(choices, lengths)
    expected = taken.sum(1, keepdims=True) * np.array(weights) / sum(weights)
    rounding = taken.sum(1, keepdims=True) * len(weights) / SCALE
    assert (np.abs(taken - expected) <= 200 * len(weights) + rounding).all()
    assert (choices == needed).sum() == len(lengths[needed])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**30), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_the_draw_does_not_depend_on_how_the_lengths_become_known(seed, pieces):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 100, 200) for _ in range(3)]
    whole, _ = Mixture([1, 2, 3]).draw(lengths)
    mixture, known, used, parts = Mixture([1, 2, 3]), [0] * 3, [0] * 3, []
    for turn in range(5000):
        ready = [own[used[s] : known[s]] for s, own in enumerate(lengths)]
        choices, needed = mixture.draw(ready)
        parts.append(choices)
        for source in range(3):
            used[source] += int((choices == source).sum())
        if known[needed] == len(lengths[needed]):
            break
        known[needed] = min(len(lengths[needed]), known[needed] + pieces[turn % len(pieces)])
        restored = Mixture([1, 2, 3])
        restored.load_state_dict(mixture.state_dict())
        mixture = restored
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_a_weight_may_drift_with_the_tokens_seen():
    lengths = [np.full(4000, 10), np.full(4000, 10)]
    drift = Mixture([[(0, 1.0), (40_000, 0.0)], [(0, 0.0), (40_000, 1.0)]])
    choices, _ = drift.draw(lengths)
    early, late = choices[:400], choices[3600:4000]
    assert (early == 0).mean() > 0.9 and (late == 1).mean() > 0.9
    assert abs((choices[:4000] == 0).mean() - 0.5) < 0.01


def sources(*counts):
    """Lists of documents whose tokens encode their source."""
    return [[np.full(4, 10 * s + 1) for _ in range(n)] for s, n in enumerate(counts)]


@pytest.mark.parametrize("pretokenize", [True, False])
@pytest.mark.parametrize(
    "stop, first, second",
    [
        ("first_exhausted", 30, 10),
        ("all_exhausted_without_replacement", 60, 10),
        ("all_exhausted", 60, 20),
    ],
)
def test_a_source_that_runs_out_ends_restarts_or_is_left_out(stop, first, second, pretokenize):
    one, two = sources(60, 10)
    data = PackedDataset(
        [(one, 3), (two, 1)],
        budget=16,
        stopping_strategy=stop,
        pretokenize=pretokenize,
        shards=1,
        pool=8,
        vocab_size=100,
    )
    packs = list(data)
    tokens = np.concatenate([pack.tokens for pack in packs])
    assert abs((tokens == 1).sum() // 4 - first) <= 3
    assert abs((tokens == 11).sum() // 4 - second) <= 1
    marks = np.concatenate([np.repeat(pack.sources, pack.lengths) for pack in packs])
    assert ((tokens == 11) == (marks == 1)).all()


def test_each_lap_of_a_cycled_source_has_its_own_order():
    one = [np.full(2, 1) for _ in range(90)]
    two = [np.array([100 + i, 100 + i]) for i in range(10)]
    data = PackedDataset([(one, 1), (two, 1)], budget=2, stopping_strategy="all_exhausted", pool=1)
    documents = np.concatenate(list(data.reader.document_order(0)))
    drawn = (documents[documents >= 90] + 10).tolist()
    laps = [drawn[i : i + 10] for i in range(0, 80, 10)]
    assert all(sorted(lap) == list(range(100, 110)) for lap in laps)
    assert len({tuple(lap) for lap in laps}) == len(laps)


@pytest.mark.parametrize("pretokenize", [True, False])
@pytest.mark.parametrize("stop", get_args(StoppingStrategy))
@pytest.mark.parametrize("drift", [[(0, 0.5), (10**9, 0.6)], [(0, 0.5), (160, 0.0)]], ids=str)
def test_a_source_is_not_drawn_while_its_weight_is_zero(stop, drift, pretokenize):
    """The weight of one source is zero, that of another changes: later, or to zero."""
    one, two, three = sources(30, 30, 60)
    data = PackedDataset(
        [(one, 1.0), (two, 0.0), (three, drift)],
        budget=16,
        stopping_strategy=stop,
        pretokenize=pretokenize,
        shards=1,
        pool=8,
    )
    tokens = np.concatenate([pack.tokens for pack in data])
    counts = [int((tokens == 10 * source + 1).sum()) // 4 for source in range(3)]
    assert counts[1] == 0 and counts[0] >= 30
    if drift[-1][1] == 0:  # 160 tokens are 40 documents
        assert counts[2] <= 12


@pytest.mark.parametrize(
    "weights",
    [[1, -1], [0, 0], [[(5, 1), (0, 2)], 1], [float("inf"), 1], [10**7, 1]],
)
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        Mixture(weights)


def test_a_list_of_pairs_is_a_mixture_and_a_list_of_documents_is_not():
    assert parse_mixture([("a", 1), ("b", 0.5)]) is not None
    assert parse_mixture([[1, 2], [3, 4]]) is None
    assert parse_mixture([]) is None
    assert parse_mixture([("a", np.int64(1)), ("b", np.float32(0.5)), ("c", ((0, 1), (9, 2)))])


@pytest.mark.parametrize("rows", [[([1, 2, 3], 7), ([4, 5], 3)], [(5, 6), (7, 8)]])
def test_rows_that_look_like_a_mixture_are_told_so(rows):
    with pytest.raises(
        ValueError, match=r"mixture of \(source, weight\), but (\[1, 2, 3\]|5) is not a source"
    ):
        PackedDataset(rows, budget=8)


@pytest.mark.parametrize("weight", [0, [(0, 1), (40, 0)]], ids=["always", "in the end"])
@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_source_without_weight_is_not_waited_for(weight, pretokenize):
    many, few = [[1, 1]] * 9, [[2, 2]] * 90
    data = PackedDataset(
        [(many, 1), (few, weight)],
        budget=4,
        stopping_strategy="all_exhausted",
        pretokenize=pretokenize,
        shards=1,
        pool=2,
    )
    tokens = np.concatenate([pack.tokens for pack in data])
    assert (tokens == 1).sum() >= 18 and (tokens == 2).sum() <= (0 if weight == 0 else 40)


@pytest.mark.parametrize("epochs", [1, None])
def test_a_shard_without_a_row_of_a_cycled_source_is_refused_by_name(epochs):
    one, two = sources(5, 40)
    mixture = [(one, 1), (two, 1)]
    settings = {
        "budget": 8,
        "stopping_strategy": "all_exhausted",
        "pretokenize": False,
        "pool": 64,
        "epochs": epochs,
    }
    data = PackedDataset(mixture, shards=8, **settings)
    with pytest.raises(ValueError, match=r"source 0 of the mixture has no samples in shard 5 of 8"):
        list(islice(data, 1000))
    fewer = PackedDataset(mixture, shards=5, **settings)
    tokens = np.concatenate([pack.tokens for pack in islice(fewer, 1000)])
    assert abs((tokens == 1).mean() - 0.5) < 0.05


@pytest.mark.parametrize("shards", [1, 8])
def test_shards_follow_a_drifting_weight_as_the_whole_does(shards):
    one, two = sources(800, 800)
    drift = [(0, 1.0), (3200, 0.0)], [(0, 0.0), (3200, 1.0)]
    mixture = list(zip((one, two), drift, strict=True))
    shown = []
    for options in ({"pretokenize": True}, {"pretokenize": False, "shards": shards}):
        packs = PackedDataset(mixture, budget=16, pool=4, shuffle=False, **options)
        tokens = np.concatenate([pack.tokens for pack in packs])[:3200]
        shown.append((tokens.reshape(4, -1) == 1).mean(1))
    assert np.abs(shown[0] - [0.875, 0.625, 0.375, 0.125]).max() < 0.03
    assert np.abs(shown[1] - shown[0]).max() < 0.06


@pytest.mark.parametrize("pretokenize", [None, False])
@pytest.mark.parametrize("how", ["iterated again", "told by set_epoch", "marked as trained"])
def test_weights_that_drift_go_on_in_the_next_pass(pretokenize, how):
    rows = [[1] * 10] * 400, [[2] * 10] * 400
    drift = [(rows[0], [(0, 1.0), (16_000, 0.0)]), (rows[1], [(0, 0.0), (16_000, 1.0)])]
    shards = None if pretokenize is None else 4
    data = PackedDataset(
        drift, budget=100, pool=8, pretokenize=pretokenize, shards=shards, rank=0, world_size=1
    )
    first = list(data)
    if how == "marked as trained":  # as for packs that workers read
        data.rewind()
        data.mark_trained(*first)
    if how != "iterated again":
        data.set_epoch(1)
    second = list(data)
    before, after = (
        sum(int((p.tokens == 2).sum()) for p in packs[:20]) for packs in (first, second)
    )
    assert before < 300 < 500 < after


@pytest.mark.parametrize("packs", [8, 16])
def test_weights_that_drift_go_on_over_passes_and_resumes(packs):
    rows = [[1] * 10] * 400, [[2] * 10] * 400
    drift = [(rows[0], [(0, 1.0), (8_000, 0.0)]), (rows[1], [(0, 0.0), (8_000, 1.0)])]

    def make(packs):
        options = {"budget": 100, "pool": 8, "pretokenize": False, "shards": 2, "shuffle": False}
        return PackedDataset(drift, **options, max_packs=packs, rank=0, world_size=1)

    def share(some):
        return np.mean([(pack.tokens == 1).mean() for pack in some])

    data, states, first = make(packs), [], []
    for pack in data:
        first.append(pack)
        states.append(json.dumps(data.state_dict()))
    passes = [first] + [list(data) for _ in range(48 // packs - 1)]
    whole = list(make(48))
    for number, some in enumerate(passes):
        assert abs(share(some) - share(whole[number * packs : (number + 1) * packs])) < 0.05
    second = [pack.tokens.tolist() for pack in passes[1]]
    for state in states[:-1:3]:
        again = make(packs)
        again.load_state_dict(json.loads(state))
        list(again)
        assert [pack.tokens.tolist() for pack in again] == second


def test_weights_that_drift_cannot_begin_with_a_later_epoch_of_a_stream():
    drift = [([[1, 2]] * 4, [(0, 1.0), (9, 0.5)]), ([[3, 4]] * 4, 1)]
    data = PackedDataset(drift, budget=8, pretokenize=False, shards=1, rank=0, world_size=1)
    data.set_epoch(0)
    with pytest.raises(ValueError, match=r"cannot start at epoch 2.*pass epochs="):
        data.set_epoch(2)


@pytest.mark.parametrize(
    "weights", [([(0, 1.0), (3200, 0.0)], [(0, 0.0), (3200, 1.0)]), (0.33, 0.67)], ids=str
)
def test_earlier_epochs_are_drawn_once(monkeypatch, weights):
    one, two = sources(40, 40)
    mixture = list(zip((one, two), weights, strict=True))
    data = PackedDataset(mixture, budget=16, epochs=5)
    asked, epoch = [], MixedOrder.epoch
    monkeypatch.setattr(MixedOrder, "epoch", lambda *a: asked.append(a[1]) or epoch(*a))
    first = [pack.tokens.tolist() for pack in data]
    assert asked == [0, 1, 2, 3, 4]
    assert data.count(4) == data.count(4) and data.count(1) > 0
    again = PackedDataset(mixture, budget=16, epochs=5)
    again.count(2)
    assert [pack.tokens.tolist() for pack in again] == first


@pytest.mark.parametrize("weight", [0, [(0, 1), (20, 0)]])
@pytest.mark.parametrize("options", [{}, {"pretokenize": False, "shards": 1}])
def test_a_source_without_weight_is_not_read_when_the_others_are_exhausted(weight, options):
    """At most the documents are drawn that its weight gave it before."""
    documents = [[[number + 1] * 4 for number in range(20)] for _ in range(3)]
    weights = 1, 1, weight
    data = PackedDataset(
        list(zip(documents, weights, strict=True)), budget=8, **options,
        stopping_strategy="all_exhausted_without_replacement",
    )  # fmt: skip
    counts = np.bincount(np.concatenate([pack.sources for pack in data]), minlength=3)
    assert counts[:2].tolist() == [20, 20] and counts[2] <= (2 if weight else 0)


@given(st.lists(st.sampled_from(["a", "a_1", "a_2", "a_2_2", "x/a", "source_1", 0]), max_size=6))
@example(["a", "a_2", "a"])
def test_every_source_has_a_name_of_its_own(sources):
    names = source_names([(source, 1) for source in sources])
    assert len(set(names)) == len(sources)


def drift_of(count: int, packs: int, **options):
    """Three sources of `count` documents, the first fading, the run of about `packs` packs."""
    rng = np.random.default_rng(count)
    lengths = [np.clip(rng.lognormal(4, 1, count), 2, 800).astype(int) for _ in range(3)]
    total = int(0.7 * np.concatenate(lengths).sum())
    rising = [(0, 0.1), (total, 0.45)]
    weights = [[(0, 0.8), (total, 0.1)], rising, rising]
    rows = [[[1] * length for length in own] for own in lengths]
    options = {"budget": total // packs, "rank": 0, "world_size": 1, **options}
    return PackedDataset(list(zip(rows, weights, strict=True)), **options), weights


def distances(data, weights, shards: int = 1) -> np.ndarray:
    """How far the tokens of each source are from the schedule after each pack, in packs.

    shards > 1: of the packs of each shard, from its part of the schedule.
    """
    packs, found = list(data), []
    for shard in range(shards):
        own = [pack for pack in packs if pack.index % shards == shard]
        tokens = np.array([np.bincount(p.sources, p.lengths, minlength=3) for p in own]).cumsum(0)
        seen = shards * tokens.sum(1)
        for source, ((_, first), (end, last)) in enumerate(weights):
            part = np.minimum(seen, end)
            wanted = first * part + (last - first) * part**2 / (2 * end) + last * (seen - part)
            found.append((tokens[:, source] - wanted / shards) / packs[0].budget)
    return np.abs(np.concatenate(found))


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"strategy": "sequential"}], ids=str)
@pytest.mark.parametrize("count, packs", [(100, 8), (300, 40), (3000, 200), (3000, 700)])
def test_the_trained_packs_follow_changing_weights(count, packs, options):
    data, weights = drift_of(count, packs, **options)
    longest = data.lengths.max() / data.settings["budget"]
    farthest = distances(data, weights).max()
    assert farthest <= (1 if longest < 0.5 else 1 + longest)


def test_each_shard_of_a_stream_follows_changing_weights():
    data, weights = drift_of(1500, 200, pretokenize=False)
    packs, longest = list(data), 800 / data.settings["budget"]
    assert distances(packs, weights, shards=8).max() <= 1 + longest
    assert distances(packs, weights).max() <= 2


def test_the_last_packs_of_a_stream_follow_changing_weights():
    """The first source ends before the last point, inside an interval of several hundred packs."""
    rng = np.random.default_rng(3)
    rows = [[[1] * length for length in rng.integers(2, 60, count)] for count in (1200, 4000, 4000)]
    weights = [[(0, 0.72), (200_000, 0.68)], *[[(0, 0.14), (200_000, 0.16)]] * 2]
    mixture = list(zip(rows, weights, strict=True))
    data = PackedDataset(mixture, budget=64, pool=4096, pretokenize=False, shards=1)
    assert distances(data, weights).max() <= 1 + 60 / 64


def test_balanced_packs_follow_changing_weights():
    data, weights = drift_of(3000, 200, balance=True)
    assert distances(data, weights).max() <= 2


def test_weights_that_change_cost_little_fill():
    data, _ = drift_of(3000, 200)
    assert data.report()["fill"] > 0.99


@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_resume_changes_no_pack_of_changing_weights(pretokenize):
    options = {"pretokenize": pretokenize, "shards": 2, "pool": 16, "epochs": 2}
    data, _ = drift_of(100, 40, **options)
    packs, states = [], []
    for pack in data:
        states.append(json.dumps(data.state_dict()))
        packs.append(pack.tokens.tolist())
    for stop in range(0, len(packs) - 1, 7):
        again, _ = drift_of(100, 40, **options)
        again.load_state_dict(json.loads(states[stop]))
        assert [pack.tokens.tolist() for pack in again] == packs[stop + 1 :]


@pytest.mark.parametrize("options", [{}, {"pretokenize": False, "shards": 2}], ids=str)
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_shares_do_not_drift_over_the_epochs_of_small_sources(stop, options):
    lengths = np.random.default_rng(1).integers(5, 40, (2, 10))
    rows = [[[source + 1] * int(n) for n in own] for source, own in enumerate(lengths)]
    data = PackedDataset(
        [(rows[0], 0.33), (rows[1], 0.67)], budget=64, epochs=None, max_packs=200,
        stopping_strategy=stop, rank=0, world_size=1, **options,
    )  # fmt: skip
    tokens = np.concatenate([pack.tokens for pack in data])
    assert abs((tokens == 1).sum() - 0.33 * len(tokens)) < 64 + 40 * 2


@pytest.mark.parametrize("pretokenize", [True, False])
@pytest.mark.parametrize("overflow, lengths", [("truncate", [500]), ("drop", [500, 50])])
def test_tokens_that_are_truncated_or_dropped_have_no_share(overflow, lengths, pretokenize):
    long, short = [[1] * n for n in lengths * 60], [[2] * 50] * 120
    data = PackedDataset(
        [(long, 0.5), (short, 0.5)], budget=200, max_length=50, overflow=overflow,
        pretokenize=pretokenize, shards=1, rank=0, world_size=1,
    )  # fmt: skip
    tokens = np.concatenate([pack.tokens for pack in data])
    assert abs((tokens == 1).mean() - 0.5) < 0.02
    if pretokenize:
        assert abs(data.report()["shares"][0] - 0.5) < 0.02


def test_a_source_that_is_dropped_completely_cannot_be_repeated():
    mixture = [([[1] * 50] * 4, 1), ([[2] * 5] * 9, 1)]
    data = PackedDataset(mixture, budget=8, overflow="drop", stopping_strategy="all_exhausted")
    with pytest.raises(ValueError, match="source 0 of the mixture is empty"):
        list(data)
    stream = PackedDataset(
        mixture, budget=8, overflow="drop", stopping_strategy="all_exhausted", pretokenize=False,
        shards=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"skipped or dropped .* or remove the source$"):
        list(stream)


def test_the_time_of_an_epoch_does_not_grow_with_the_square_of_its_draws(monkeypatch):
    counted = []
    count = lambda items: counted.append(1) or len(items)  # noqa: E731
    monkeypatch.setattr("nopad.packing.ordering.mixture.len", count, raising=False)
    mixture, lengths = Mixture([1, 1], "all_exhausted"), np.full(1002, 10)
    order = MixedOrder([0, 2, 1002], lengths.__getitem__, mixture, seed=0, shuffle=True)
    assert sum(map(len, order.read(0))) == 2001
    assert len(counted) < 20_000  # about 500 draws


def test_a_lap_of_a_small_source_does_not_read_the_queue_of_a_large_one():
    read, lengths = [], np.full(10_002, 10)
    mixture = Mixture([1, 1], "all_exhausted")
    order = MixedOrder(
        [0, 2, 10_002], lambda i: read.append(len(i)) or lengths[i], mixture, seed=0, shuffle=True
    )
    next(order.read(0))
    assert max(read) < 2000


def test_weights_change_linearly_also_where_their_sum_changes():
    mixture = Mixture([[(0, 0.1), (10_000, 1.0)], 1])
    choices, _ = mixture.draw([np.full(1000, 10)] * 2)
    share = 1 - np.log(2.0 / 1.1) / 0.9  # the integral of w / (w + 1) for w from 0.1 to 1
    assert (choices[:1000] == 0).mean() == pytest.approx(share, abs=2e-3)


def test_padding_between_samples_has_no_share_in_a_stream(tmp_path):
    weights = [[(0, 0.9), (4000, 0.1)], [(0, 0.1), (4000, 0.9)]]
    for source in range(2):
        rows = [{"input_ids": [1] * (3 + (7 * n + source) % 11)} for n in range(200)]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [(str(tmp_path / f"{source}.jsonl"), weights[source]) for source in range(2)]
    data = PackedDataset(pairs, budget=64, pad_to_multiple_of=8, pretokenize=False, shards=1)
    tokens, farthest = np.zeros(2), 0.0
    for pack in data:
        np.add.at(tokens, np.repeat(pack.sources, pack.lengths), pack.tokens)  # padding is 0
        seen, part = tokens.sum(), min(tokens.sum(), 4000)
        wanted = 0.9 * part - 0.8 * part**2 / 8000 + 0.1 * (seen - part)
        farthest = max(farthest, abs(tokens[0] - wanted))
    assert data.report()["shares"] == pytest.approx(tokens / tokens.sum())
    assert farthest <= 64 + 13
