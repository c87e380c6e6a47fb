"""Packs gathered by the compiled loop equal packs copied one token at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.packing import IGNORE_INDEX, Pack, Plan, Sample
from nopad.packing.sources import TokenArray, TokenStore


def naive(samples, segments, align, pad):
    tokens, labels, bounds = [], [], [0]
    for document, start, length in segments:
        width = -(-length // align) * align
        tokens += samples[document].tokens[start : start + length].tolist()
        own = samples[document].labels[start : start + length].tolist()
        labels += [IGNORE_INDEX, *own[1:]] + [IGNORE_INDEX] * (width - length)
        tokens += [pad] * (width - length)
        bounds.append(len(tokens))
    return tokens, labels, bounds


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_laying_out_equals_the_naive_way(data):
    kinds = data.draw(
        st.lists(st.sampled_from([np.uint16, np.int32, np.int64]), min_size=1, max_size=3)
    )
    arrays, samples = [], []
    for number, kind in enumerate(kinds):
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
        own = [Sample(np.arange(n) + 100 * (len(samples) + i)) for i, n in enumerate(lengths)]
        if number == 1:  # an array with its own labels
            own = [Sample(s.tokens, np.where(s.tokens % 3, s.tokens, IGNORE_INDEX)) for s in own]
        array = TokenArray.of(own, source=number)
        arrays.append(
            TokenArray(
                "x", array.flat.astype(kind), array.begins, array.lengths, array.labels, number
            )
        )
        samples += own
    store, segments = TokenStore(arrays), []
    for _ in range(data.draw(st.integers(1, 12))):
        document = data.draw(st.integers(0, len(samples) - 1))
        start = data.draw(st.integers(0, len(samples[document]) - 1))
        length = data.draw(st.integers(1, len(samples[document]) - start))
        segments.append((document, start, length))
    align = data.draw(st.sampled_from([1, 2, 8]))
    columns = [np.array(column, np.int64) for column in zip(*segments, strict=True)]
    plan = Plan(*columns, np.array([0, len(segments)]))
    rows = store.gather(plan, np.array([0]), align, pad_token_id=7)
    tokens, labels, bounds = naive(samples, segments, align, 7)
    assert rows.tokens.tolist() == tokens
    marks = rows.labels if len(rows.labels) else None  # derived from the tokens on demand
    pack = Pack(rows.tokens, marks, rows.cu_seqlens, len(tokens), *[rows.documents] * 3)
    assert pack.num_label_tokens == sum(label != IGNORE_INDEX for label in labels)
    assert pack.labels.tolist() == labels
    assert rows.cu_seqlens.tolist() == bounds


def test_an_id_beyond_the_vocabulary_is_named_with_its_document():
    store = TokenStore(
        [TokenArray.of([Sample(np.array([1, 2])), Sample(np.array([3, 99, 4]))], "mine")]
    )
    plan = Plan(*map(np.array, ([0, 1], [0, 0], [2, 3], [0, 2])))
    store.gather(plan, np.array([0]), vocab_size=100)
    with pytest.raises(ValueError, match="mine, document 1 contains the id 99"):
        store.gather(plan, np.array([0]), vocab_size=99)


def test_a_negative_id_is_named_whatever_the_vocabulary():
    array = TokenArray("mine", np.array([1, -2, 3]), np.array([0]), np.array([3]))
    with pytest.raises(ValueError, match="mine, document 0 contains the id -2"):
        plan = Plan(*map(np.array, ([0], [0], [3], [0, 1])))
        TokenStore([array]).gather(plan, np.array([0]))


def test_an_empty_document_is_named():
    array = TokenArray("mine", np.arange(5), np.array([0, 2, 2]), np.array([2, 0, 3]))
    with pytest.raises(ValueError, match="mine, document 1 is empty"):
        TokenStore([array]).check()


@pytest.mark.parametrize("label", [-5, -101, 10])
def test_a_label_outside_the_vocabulary_is_refused_with_its_document(label):
    good = TokenArray(
        "good", np.arange(4), np.array([0]), np.array([4]), np.array([-100, 1, -100, 3])
    )
    flat, labels = np.arange(5), np.array([0, 1, 2, label, 4])
    bad = TokenArray("bad", flat, np.array([0, 2]), np.array([2, 3]), labels)
    plan = Plan(*map(np.array, ([0, 1, 2], [0, 0, 0], [4, 2, 3], [0, 3])))
    store = TokenStore([good, bad])
    with pytest.raises(ValueError, match=f"bad, document 2 contains the label {label}: ids range"):
        store.gather(plan, np.array([0]), vocab_size=10)
    labels[3] = 3
    assert store.gather(plan, np.array([0]), vocab_size=10).labels.tolist()[-2:] == [3, 4]


@pytest.mark.parametrize(
    ("begin", "length", "labels"), [(-1, 3, None), (2, 4, None), (0, 5, np.arange(4))]
)
def test_documents_that_reach_beyond_their_tokens_are_refused(begin, length, labels):
    array = TokenArray("x", np.arange(5), np.array([begin]), np.array([length]), labels)
    with pytest.raises(ValueError, match=f"documents range from {begin} to {begin + length}"):
        TokenStore([array]).check()
    TokenStore([TokenArray("x", np.arange(5), np.array([0]), np.array([5]))]).check()
