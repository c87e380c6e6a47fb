"""Samples to packs: every token once, in its sample, within the budget, at any kill point."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing import IGNORE_INDEX, Packer, Sample

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=120)
SETTINGS = st.fixed_dictionaries(
    {
        "budget": st.integers(8, 64),
        "pool": st.integers(1, 24),
        "strategy": st.sampled_from(["best_fit", "sequential", "concat"]),
        "pad_to_multiple_of": st.sampled_from([1, 2, 4]),
        "continue_positions": st.booleans(),
    }
)


def numbered(lengths):
    """Samples whose tokens encode their sample and position."""
    return [Sample(1000 * (i + 1) + np.arange(n)) for i, n in enumerate(lengths)]


def pack_all(packer, samples, chunk=7):
    packs = []
    for begin in range(0, len(samples), chunk):
        packs += packer.add(samples[begin : begin + chunk])
    return packs + list(packer.finish())


def check(packs, samples, budget, align, continued):
    found = {i: [] for i in range(len(samples))}
    for pack in packs:
        assert len(pack.tokens) <= budget
        for s, number in enumerate(pack.samples.tolist()):
            a, b = pack.cu_seqlens[s], pack.cu_seqlens[s + 1]
            assert (b - a) % align == 0 or align == 1
            tokens = pack.tokens[a:b]
            tokens = tokens[tokens > 0]
            labels = pack.labels[a : a + len(tokens)]
            assert labels[0] == IGNORE_INDEX and (labels[1:] == tokens[1:]).all()
            assert (pack.labels[a + len(tokens) : b] == IGNORE_INDEX).all()
            start = tokens[0] - samples[number].tokens[0]
            assert pack.first_positions[s] == (start if continued else 0)
            found[number].append(tokens)
    for number, parts in found.items():
        parts.sort(key=lambda part: part[0])
        assert np.array_equal(np.concatenate(parts), samples[number].tokens)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, SETTINGS)
def test_every_token_is_packed_exactly_once_with_right_boundaries(lengths, choice):
    samples = numbered(lengths)
    packs = pack_all(Packer(**choice), samples)
    check(
        packs, samples, choice["budget"], choice["pad_to_multiple_of"], choice["continue_positions"]
    )


@settings(max_examples=100, deadline=None)
@given(LENGTHS, SETTINGS, st.integers(0, 120), st.integers(1, 9))
def test_a_packer_killed_anywhere_continues_with_the_same_packs(lengths, choice, cut, chunk):
    samples = numbered(lengths)
    whole = [pack.tokens.tolist() for pack in pack_all(Packer(**choice), samples, chunk=1)]
    first, cut = Packer(**choice), min(cut, len(samples))
    packs = [pack.tokens.tolist() for pack in first.add(samples[:cut])]
    state = json.loads(json.dumps(first.state_dict()))
    second = Packer(**choice)
    second.load_state_dict(state, {n: samples[n] for n in first.pending})
    packs += [pack.tokens.tolist() for pack in pack_all(second, samples[cut:], chunk)]
    assert packs == whole


@pytest.mark.parametrize(
    "overflow, kept", [("split", 25), ("truncate", 10 + 5), ("drop", 5), ("error", None)]
)
def test_a_sample_longer_than_the_budget_is_treated_and_counted_as_asked(overflow, kept):
    packer = Packer(10, pool=1, overflow=overflow)
    samples = numbered([20, 5])
    if kept is None:
        with pytest.raises(ValueError, match="item 0 has 20 tokens"):
            pack_all(packer, samples)
        return
    packs = pack_all(packer, samples)
    counts = packer.counts
    assert sum(len(pack.tokens) for pack in packs) == kept == counts.packed_tokens
    assert counts.tokens == 25 == kept + counts.truncated_tokens + counts.dropped_tokens
    assert not packer.pending


def test_labels_are_kept_and_the_head_of_a_part_does_not_count():
    labels = np.array([1, IGNORE_INDEX, 3, 4, 5, IGNORE_INDEX, 7])
    packs = pack_all(Packer(4, pool=1), [Sample(np.arange(1, 8), labels)])
    assert [pack.labels.tolist() for pack in packs] == [
        [IGNORE_INDEX, IGNORE_INDEX, 3, 4],
        [IGNORE_INDEX, IGNORE_INDEX, 7],
    ]


def test_the_pool_bounds_what_is_held():
    packer = Packer(64, pool=16)
    for sample in numbered(np.random.default_rng(0).integers(1, 60, 500)):
        list(packer.add([sample]))
        assert len(packer.pending) <= 16


def test_what_is_no_sample_is_refused_before_anything_is_taken():
    packer = Packer(8, pool=4)
    with pytest.raises(ValueError, match="sample 1 is a list"):
        packer.add([Sample(np.arange(1, 4)), [1, 2, 3]])
    assert packer.counts.items == 0 and not packer.pending


def test_a_sample_rounds_nothing():
    with pytest.raises(ValueError, match="must be integers, got float64"):
        Sample(np.array([1.7, 2.2]))
    with pytest.raises(ValueError, match="float64 labels"):
        Sample(np.array([1, 2]), np.array([1.0, 2.0]))


@pytest.mark.parametrize("choice", [{}, {"pad_to_multiple_of": 2}, {"overflow": "truncate"}])
@pytest.mark.parametrize("length", [1, 8, 12, 40])
def test_a_sample_that_is_read_again_with_another_length_is_refused(choice, length):
    first = Packer(10, pool=8, **choice)
    list(first.add(numbered([11, 3, 11])))
    samples = dict(first.pending)
    assert sorted(samples)[-1] == 2 and len(samples[2]) == 11
    changed = {**samples, 2: Sample(np.arange(length))}
    state = first.state_dict()
    Packer(10, pool=8, **choice).load_state_dict(state, samples)
    if choice.get("overflow") == "truncate" and length > 10:
        return  # truncated tokens are not compared
    with pytest.raises(ValueError, match=f"sample 2 has {length} tokens, a different number"):
        Packer(10, pool=8, **choice).load_state_dict(state, changed)


def test_the_labels_of_a_long_sample_are_counted_once(monkeypatch):
    counted, count = [], np.count_nonzero
    monkeypatch.setattr(np, "count_nonzero", lambda own: counted.append(len(own)) or count(own))
    packs = pack_all(Packer(10, pool=4), numbered([1000, 3]))
    assert len(packs) == 101 and counted == [1000]
    assert all(pack.parent_label_counts.tolist() == [999] for pack in packs[:100])
