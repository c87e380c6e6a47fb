"""The planner: nothing lost, nothing over budget, nothing late, for any calls and restarts."""

import json
import resource
from bisect import bisect_left, insort
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nopad.packing import Plan, Planner, pack_lengths
from nopad.packing.planning.best_fit import MAX_DEFERRALS
from nopad.packing.planning.planner import VERSION

LENGTHS = st.lists(st.integers(1, 40), max_size=120)
SETTINGS = st.fixed_dictionaries(
    {
        "budget": st.integers(8, 64),
        "pool": st.integers(1, 24),
        "strategy": st.sampled_from(["best_fit", "sequential", "concat"]),
        "overflow": st.sampled_from(["split", "truncate", "drop"]),
        "pad_to_multiple_of": st.sampled_from([1, 1, 2, 8]),
        "max_length": st.sampled_from([None, None, 2, 5, 100]),
    }
).map(lambda s: s | ({"overflow": "split"} if s["strategy"] == "concat" else {}))
MIXES = {
    "easy@2048": (350, 1.1, 2048),
    "easy@8192": (350, 1.1, 8192),
    "hard@2048": (900, 0.35, 2048),
    "hard@4096": (1500, 0.5, 4096),
    "hard@8192": (2500, 0.6, 8192),
    "even@2048": (0, 0, 2048),
    "even@8192": (0, 0, 8192),
}


def mix(median, sigma, budget, n=20_000, seed=3):
    """Draw lengths: lognormal, or uniform if there is no median."""
    rng = np.random.default_rng(seed)
    if not median:
        return rng.integers(1, budget + 1, n)
    return np.clip(rng.lognormal(np.log(median), sigma, n), 1, budget).astype(np.int64)


def plan_in_calls(lengths, chosen, cuts=(), restore=False):
    """Plan with the lengths cut into calls, and a new planner for every call if `restore`."""
    planner, plans = Planner(**chosen), []
    for part in np.split(np.array(lengths, np.int64), sorted(cuts)):
        if restore:
            state = json.loads(json.dumps(planner.state_dict()))
            planner = Planner(**chosen)
            planner.load_state_dict(state)
        plans.append(planner.feed(part))
    return Plan.join([*plans, planner.finish()]), planner


def assert_same(one, other):
    for name in Plan.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def expected_tokens(lengths, chosen):
    """Return (item, token) of everything that must be packed, in order."""
    room = chosen["budget"] // chosen["pad_to_multiple_of"] * chosen["pad_to_multiple_of"]
    room = min(room, chosen.get("max_length") or room)
    kept = []
    for item, length in enumerate(lengths):
        if length > room and chosen["overflow"] == "truncate":
            length = room
        if length <= room or chosen["overflow"] == "split":
            kept += [(item, token) for token in range(length)]
    return kept


@settings(max_examples=300, deadline=None)
@given(LENGTHS, SETTINGS)
@example(
    [40] * 30,
    {"budget": 9, "pool": 2, "strategy": "best_fit", "overflow": "split", "pad_to_multiple_of": 8},
)
def test_every_token_comes_out_exactly_once_and_no_pack_is_over_budget(lengths, chosen):
    plan, planner = plan_in_calls(lengths, chosen)
    out = [
        (item, token)
        for item, start, length in zip(plan.items, plan.starts, plan.lengths, strict=True)
        for token in range(start, start + length)
    ]
    assert sorted(out) == expected_tokens(lengths, chosen)
    align = chosen["pad_to_multiple_of"]
    places = plan.sum_per_pack(-(-plan.lengths // align) * align)
    assert (places <= chosen["budget"]).all()
    assert plan.lengths.max(initial=0) <= (chosen.get("max_length") or chosen["budget"])
    assert (np.diff(plan.offsets) > 0).all() and (plan.lengths > 0).all()
    counts = planner.counts
    assert counts.pending_tokens == 0 and counts.packs == len(plan)
    assert counts.items == len(lengths) and counts.tokens == sum(lengths)
    assert counts.packed_tokens == len(out)
    assert counts.tokens == len(out) + counts.truncated_tokens + counts.dropped_tokens


@settings(max_examples=200, deadline=None)
@given(LENGTHS, SETTINGS, st.data())
def test_packs_do_not_depend_on_the_calls(lengths, chosen, data):
    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=8))
    whole, _ = plan_in_calls(lengths, chosen)
    assert_same(plan_in_calls(lengths, chosen, cuts)[0], whole)
    assert_same(plan_in_calls(lengths, chosen, range(len(lengths)))[0], whole)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, SETTINGS)
def test_a_restore_at_every_point_continues_bit_identically(lengths, chosen):
    whole, one = plan_in_calls(lengths, chosen)
    resumed, other = plan_in_calls(lengths, chosen, range(len(lengths)), restore=True)
    assert_same(resumed, whole)
    assert one.counts == other.counts


@pytest.mark.parametrize("name", ["easy@2048", "hard@8192", "even@8192"])
def test_a_restore_anywhere_in_a_long_stream_continues_bit_identically(name):
    lengths, budget = mix(*MIXES[name]), MIXES[name][2]
    whole = pack_lengths(lengths, budget)
    for cut in np.random.default_rng(0).integers(1, len(lengths), 40):
        resumed, _ = plan_in_calls(lengths, {"budget": budget}, [cut], restore=True)
        assert_same(resumed, whole)


@pytest.mark.parametrize("kind", ["lognormal", "even", "over half", "one misfit", "two sizes"])
@pytest.mark.parametrize("pool", [4, 32])
def test_no_segment_waits_longer_than_promised(kind, pool):
    rng = np.random.default_rng(1)
    n, budget = 3000, 512
    lengths = {
        "lognormal": np.clip(rng.lognormal(5, 0.6, n), 1, budget).astype(int),
        "even": rng.integers(1, budget + 1, n),
        "over half": rng.integers(257, 300, n),
        "one misfit": np.where(np.arange(n) == 7, 301, 128),
        "two sizes": np.where(np.arange(n) % 50 == 0, 300, 256),
    }[kind]
    planner = Planner(budget, pool=pool)
    left_at = np.full(n, -1)
    for now, length in enumerate(lengths):
        left_at[planner.feed(np.array([length])).items] = now
        assert planner.pending.shape[1] < pool
    left_at[planner.finish().items] = n - 1
    assert (left_at >= 0).all()
    assert (left_at - np.arange(n)).max() <= (MAX_DEFERRALS + 1) * pool == 15 * pool


def best_fit_decreasing(lengths, budget):
    """Count the packs of textbook best-fit decreasing over all items."""
    rooms, packs = [], 0
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(rooms, length)
        packs += at == len(rooms)
        room = rooms.pop(at) if at < len(rooms) else budget
        insort(rooms, room - length)
    return packs


@pytest.mark.parametrize("name", MIXES)
def test_packs_are_as_full_as_promised(name):
    lengths, budget = mix(*MIXES[name]), MIXES[name][2]
    plan = pack_lengths(lengths, budget)
    offline = lengths.sum() / (best_fit_decreasing(lengths, budget) * budget)
    steady = plan.take(np.arange(len(plan) - 1024 * len(plan) // len(lengths)))
    assert steady.fill(budget) > offline - 0.003
    if name.startswith("easy"):
        assert steady.fill(budget) > 0.999


@pytest.mark.parametrize("name", MIXES)
def test_the_whole_set_packs_as_well_as_best_fit_decreasing(name):
    lengths, budget = mix(*MIXES[name], n=5000), MIXES[name][2]
    packs = len(pack_lengths(lengths, budget, pool=None))
    assert packs <= 1.003 * best_fit_decreasing(lengths, budget)


@pytest.mark.parametrize("name", MIXES)
def test_long_and_short_items_are_spread_evenly(name):
    lengths, budget = mix(*MIXES[name], n=100_000), MIXES[name][2]
    plan = pack_lengths(lengths, budget)
    rank = np.argsort(np.argsort(plan.lengths, kind="stable"))
    assert abs(np.corrcoef(rank, np.arange(len(rank)))[0, 1]) <= 0.01


def test_sequential_keeps_the_order_and_fills_each_pack():
    plan = pack_lengths([4, 3, 5, 2, 6, 1], 6, strategy="sequential")
    assert [pack.tolist() for pack in plan] == [[0], [1], [2], [3], [4], [5]]
    lengths = mix(350, 1.1, 2048, 2000)
    plan = pack_lengths(lengths, 2048, strategy="sequential")
    assert plan.items.tolist() == list(range(2000))
    assert (plan.tokens[:-1] + plan.lengths[plan.offsets[1:-1]] > 2048).all()


def test_concat_loses_no_space_and_cuts_at_the_budget():
    lengths = mix(350, 1.1, 8192, 2000)
    plan = pack_lengths(lengths, 1000, strategy="concat")
    assert (plan.tokens[:-1] == 1000).all() and plan.lengths.sum() == lengths.sum()
    assert (np.diff(plan.items) >= 0).all()


def test_aligned_segments_keep_their_true_lengths():
    lengths = mix(350, 1.1, 2048, 2000)
    plan = pack_lengths(lengths, 2048, pad_to_multiple_of=16)
    assert plan.lengths.sum() == lengths.sum()
    assert (plan.sum_per_pack(-(-plan.lengths // 16) * 16) <= 2048).all()


def test_an_item_longer_than_a_pack_is_refused_by_name():
    planner = Planner(8, pool=4, overflow="error")
    planner.feed(np.array([3, 3]))
    before = planner.state_dict()
    with pytest.raises(ValueError, match="item 3 has 9 tokens, at most 8 are"):
        planner.feed(np.array([2, 9]))
    assert planner.state_dict() == before


@pytest.mark.parametrize("bad", [[3, 0], [3, -1], [[1, 2]], [1.5], ["a"], [True]])
def test_what_is_not_a_length_is_refused_and_nothing_is_taken(bad):
    planner = Planner(8, pool=4)
    before = planner.state_dict()
    with pytest.raises(ValueError, match=r"length|integers"):
        planner.feed(np.array(bad))
    assert planner.state_dict() == before


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"strategy": "magic"}, "choose best_fit"),
        ({"overflow": "lose"}, "choose split"),
        ({"strategy": "concat", "overflow": "drop"}, "concat always splits"),
        ({"pad_to_multiple_of": 9}, "at most the budget"),
        ({"pad_to_multiple_of": 0}, "at least 1"),
        ({"pool": 0}, "pass at least 1"),
    ],
)
def test_wrong_settings_are_refused_with_the_way_out(chosen, message):
    with pytest.raises(ValueError, match=message):
        Planner(8, **chosen)


def test_the_state_is_small_and_names_what_differs():
    planner = Planner(8192)
    lengths = mix(350, 1.1, 8192, 3000)
    for at in range(0, 3000, 10):
        planner.feed(lengths[at : at + 10])
        assert len(json.dumps(planner.state_dict())) < 10_000
    state = planner.state_dict()
    for changed in (
        {"budget": 4096},
        {"pool": 512},
        {"pad_to_multiple_of": 2},
        {"strategy": "sequential"},
    ):
        with pytest.raises(ValueError, match=next(iter(changed))):
            Planner(**{"budget": 8192, **changed}).load_state_dict(state)
    with pytest.raises(ValueError, match="version 0"):
        Planner(8192).load_state_dict(state | {"version": 0})


NAMES = ["items", "starts", "lengths", "deferrals", "first", "counts"]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_state_is_refused_before_any_loop_runs(name):
    planner = Planner(64, pool=16)
    planner.feed(np.arange(1, 200) % 50 + 1)
    state = planner.state_dict()
    state[name] = {
        "items": "1:AQ==",
        "starts": "1:AQ==",
        "lengths": "8:" + "/////////38=",
        "deferrals": "1:" + "/" * 4,
        "first": 10**6,
        "counts": state["counts"] | {"tokens": 1},
    }[name]
    with pytest.raises(ValueError, match="damaged"):
        Planner(64, pool=16).load_state_dict(state)


def test_memory_does_not_grow_with_the_stream():
    planner, lengths = Planner(2048), mix(350, 1.1, 2048, 50_000)
    for at in range(0, 50_000, 5000):
        planner.feed(lengths[at : at + 5000])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        for at in range(0, 50_000, 5000):
            planner.feed(lengths[at : at + 5000])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert planner.counts.items == 1_050_000 and grown < 4096, f"{grown} kB more"


def test_one_huge_item_is_split_without_ado():
    plan = pack_lengths([10**7, 3], 2048)
    assert plan.lengths.sum() == 10**7 + 3 and len(plan) == 4883
    assert sorted(plan.starts[plan.items == 0].tolist()) == list(range(0, 10**7, 2048))


@pytest.mark.parametrize("count, multiple", [(50, 3), (100, 4), (127, 4)])
def test_a_small_set_has_the_fewest_packs_whatever_its_order(count, multiple):
    rng = np.random.default_rng(count)
    lengths = np.maximum(rng.lognormal(5, 0.4, count), 1).astype(int)
    budget = int(lengths.mean() * multiple)
    lengths = np.minimum(lengths, budget)
    for _ in range(50):
        assert len(pack_lengths(rng.permutation(lengths), budget)) == -(-lengths.sum() // budget)


def test_the_packs_of_a_version_never_change():
    lengths = (np.arange(20_000) * 7919 % 10_007) ** 2 % 2048 + 1
    plans = [pack_lengths(lengths, 2048), pack_lengths(lengths[:1000], 2048)]
    content = b"".join(
        getattr(plan, name).astype("<i8").tobytes() for plan in plans for name in Plan.__slots__
    )
    assert (VERSION, sha256(content).hexdigest()[:16]) == (1, "be2ae6a52d12e78b")


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(LENGTHS, SETTINGS, st.data())
def test_packs_do_not_depend_on_the_calls_at_length(lengths, chosen, data):
    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=8))
    whole, _ = plan_in_calls(lengths, chosen)
    assert_same(plan_in_calls(lengths, chosen, cuts, restore=True)[0], whole)


@pytest.mark.parametrize("settings", [{"budget": 0}, {"budget": 8, "pad_to_multiple_of": 0}])
def test_a_whole_set_is_planned_with_possible_settings_only(settings):
    with pytest.raises(ValueError, match=r"^(budget|pad_to_multiple_of) 0"):
        pack_lengths([3], pool=None, **settings)
