"""Leveling: the same packs in another order, in which ranks that step together have equal work."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nopad.packing import Plan, pack_lengths
from nopad.packing.planning import Cost, balance_plan
from nopad.packing.planning.balancing import Leveler


def lognormal_plan(n=100_000, budget=8192, seed=0):
    lengths = np.random.default_rng(seed).lognormal(np.log(350), 1.1, n)
    return pack_lengths(np.clip(lengths, 1, budget).astype(np.int64), budget)


def spread(costs, ranks):
    """Return the time of the slowest rank over the mean, summed over all complete steps."""
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return steps.max(1).sum() / steps.mean(1).sum()


def pack_list(plan):
    """Return the packs as (item, start, length) lists, in order."""
    columns = np.stack([plan.items, plan.starts, plan.lengths], 1).tolist()
    return [columns[plan.segments(p)] for p in range(len(plan))]


def assert_same(one, other):
    for name in Plan.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 5))
@example(200, 0, 0)
@example(150, 70, 1)
def test_every_pack_comes_out_whole_exactly_once_whatever_the_calls(packs, first, seed):
    counts = np.random.default_rng(packs).integers(1, 6, packs)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    items = np.arange(offsets[-1])
    plan = Plan(items, items % 3, items * 7 % 50 + 1, offsets)
    whole = Leveler(block=64, seed=seed, first=first)
    out = Plan.join([whole.feed(plan), whole.finish()])
    assert sorted(pack_list(out)) == sorted(pack_list(plan))
    by_one = Leveler(block=64, seed=seed, first=first)
    parts = [by_one.feed(plan.take(np.array([p]))) for p in range(len(plan))]
    assert_same(Plan.join([*parts, by_one.finish()]), out)


def test_ranks_that_step_together_work_alike():
    plan = lognormal_plan()
    leveled = balance_plan(plan)
    seven_b, attention = Cost(), Cost(0.0, 1.0)
    assert spread(seven_b.of_packs(plan), 8) > 1.1  # the reason for leveling
    assert spread(seven_b.of_packs(leveled), 8) <= 1.01
    assert spread(seven_b.of_packs(leveled), 64) <= 1.02
    assert spread(attention.of_packs(leveled), 8) <= 1.05
    assert leveled.fill(8192) == plan.fill(8192)


@pytest.mark.parametrize("first", [0, 5, 61, 64, 1000])
def test_groups_stay_aligned_in_a_run_that_began_elsewhere(first):
    leveller = Leveler(first=first)
    costs = Cost().of_packs(leveller.feed(lognormal_plan(40_000)))
    for ranks, most in ((8, 1.003), (64, 1.02)):
        assert spread(costs[-first % ranks :], ranks) <= most


def test_a_pack_moves_at_most_one_window():
    plan = lognormal_plan(40_000)
    places = np.empty(len(plan), int)
    first_items = {pack[0].item(): p for p, pack in enumerate(plan)}
    for place, pack in enumerate(balance_plan(plan, block=256)):
        places[first_items[pack[0].item()]] = place
    assert (places // 256 == np.arange(len(plan)) // 256).all()


def test_steps_of_one_window_come_in_no_order_of_cost():
    costs = Cost().of_packs(balance_plan(lognormal_plan()))
    steps = costs[: len(costs) // 1024 * 1024].reshape(-1, 128, 8).mean(2)
    assert max(abs(np.corrcoef(window, np.arange(128))[0, 1]) for window in steps) < 0.5
    ranks = costs[: len(costs) // 8 * 8].reshape(-1, 8).mean(0)
    assert ranks.max() / ranks.mean() < 1.001  # no rank always gets the expensive packs


def test_shards_that_level_alone_still_step_together():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(350), 1.1, 100_000), 1, 8192)
    shards = [pack_lengths(lengths[s::8].astype(int), 8192) for s in range(8)]
    steps = min(map(len, shards))
    before, behind = (
        np.stack([Cost().of_packs(plan)[:steps] for plan in plans], 1)
        for plans in (shards, [balance_plan(plan, block=128) for plan in shards])
    )
    assert spread(before.ravel(), 8) > 1.1 and spread(behind.ravel(), 8) < 1.025


def test_a_seed_changes_the_order_and_nothing_else():
    plan = lognormal_plan(20_000)
    one, other = balance_plan(plan, seed=1), balance_plan(plan, seed=2)
    assert pack_list(one) != pack_list(other)
    assert sorted(pack_list(one)) == sorted(pack_list(other))
    assert_same(balance_plan(plan, seed=1), one)


def test_a_window_that_cuts_groups_is_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        Leveler(block=100)


def test_a_cost_that_does_not_grow_is_refused():
    with pytest.raises(ValueError, match="must increase"):
        Cost(0.0, 0.0)
