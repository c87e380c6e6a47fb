"""The packed batch: drop-in for lists of samples, with boundaries, and with fixed shapes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.collators import PackedCollator, PaddedCollator
from nopad.packing import IGNORE_INDEX, Pack, PackedDataset, Sample

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def pack_of(lengths, budget=None, seed=0) -> Pack:
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(1, 50, n)) for n in lengths]
    return Pack.of(samples, budget=budget or sum(lengths))


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_every_sequence_comes_back_from_the_batch_as_it_went_in(rows, stack, fixed):
    budget = max(sum(row) for row in rows) + 3
    packs = [pack_of(row, budget, seed) for seed, row in enumerate(rows)]
    collator = PackedCollator(stack=stack, fixed_sequences=32 if fixed else None, seq_idx=True)
    batch = collator(packs)
    cu = batch["cu_seq_lens_q"].tolist()
    flat = {k: batch[k].flatten() for k in ("input_ids", "labels", "position_ids", "seq_idx")}
    parts = [(a, b) for a, b in itertools.pairwise(cu) if b > a]
    assert cu[0] == 0 and cu[-1] == len(flat["input_ids"])
    wanted = [
        (pack.tokens[a:b].tolist(), pack.labels[a:b].tolist())
        for pack in packs
        for a, b in zip(pack.cu_seqlens, pack.cu_seqlens[1:], strict=False)
    ]
    got = [(flat["input_ids"][a:b].tolist(), flat["labels"][a:b].tolist()) for a, b in parts]
    assert [pair for pair in got if pair in wanted] == wanted
    for number, (a, b) in enumerate(parts):
        assert flat["position_ids"][a:b].tolist() == list(range(b - a))
        assert flat["seq_idx"][a:b].tolist() == [number] * (b - a)
        assert flat["labels"][a] == IGNORE_INDEX
    assert batch["use_cache"] is False and "attention_mask" not in batch
    assert isinstance(batch["max_length_q"], int)
    assert batch["max_length_q"] >= max(b - a for a, b in parts)


def test_fixed_shapes_do_not_depend_on_the_pack():
    collator = PackedCollator(fixed_sequences=8)
    shapes = {
        tuple((k, tuple(v.shape) if torch.is_tensor(v) else v) for k, v in collator(pack).items())
        for pack in (pack_of([3, 4], 16), pack_of([16], 16), pack_of([1] * 7, 16))
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(
    "options", [{"fixed_sequences": 4}, {"pad_to_budget": True}, {"stack": True}]
)
def test_plain_samples_cannot_be_filled_up_to_a_budget(options):
    with pytest.raises(ValueError, match="samples have no budget: pass packs"):
        PackedCollator(**options)([{"input_ids": [1, 2, 3]}])


def test_packs_of_different_budgets_are_not_stacked():
    with pytest.raises(ValueError, match=r"packs of the budgets \[4, 8\] cannot be stacked"):
        PackedCollator(stack=True)([pack_of([3], 8), pack_of([3], 4)])


def test_more_sequences_than_fixed_raise_and_name_the_way_out():
    with pytest.raises(ValueError, match=r"4 sequences, but fixed_sequences=3: raise it"):
        PackedCollator(fixed_sequences=3)(pack_of([1, 1, 1], 16))


def test_a_sequence_longer_than_the_fixed_length_raises():
    with pytest.raises(ValueError, match=r"9 tokens is longer than max_length=8"):
        PackedCollator(fixed_sequences=3, max_length=8)(pack_of([9], 9))


def test_an_empty_pack_is_one_token_that_counts_nothing():
    batch = PackedCollator()(Pack.of([], budget=8))
    assert batch["input_ids"].shape == (1, 1) and batch["labels"].tolist() == [[IGNORE_INDEX]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 1]


def test_plain_lists_tensors_and_labels_of_one_s_own_are_taken():
    rows = [
        {"input_ids": torch.tensor([5, 6, 7]), "labels": [IGNORE_INDEX, IGNORE_INDEX, 7]},
        {"input_ids": np.array([8, 9]), "attention_mask": [1, 1]},
    ]
    batch = PackedCollator()(rows)
    assert batch["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX, 9]]


def test_rows_without_tokens_raise():
    with pytest.raises(ValueError, match="needs `input_ids`"):
        PackedCollator()([{"text": "hello"}])
    with pytest.raises(ValueError, match="empty list"):
        PackedCollator()([])


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (
            PackedCollator,
            {"pad_token_id": None, "pad_to_budget": True},
            "pad_token_id=None: pass any id",
        ),
        (PackedCollator, {"pad_token_id": -1}, "pad_token_id=-1: pass any id"),
        (PackedCollator, {"max_length": 5}, "max_length=5, fixed_sequences=None"),
        (PackedCollator, {"max_length": -3, "fixed_sequences": 4}, "max_length=-3"),
        (PackedCollator, {"max_length": 0, "fixed_sequences": 4}, "max_length=0"),
        (PaddedCollator, {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0: pass at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(kind, settings, told):
    with pytest.raises(ValueError, match=told):
        kind(**settings)


def test_a_padded_batch_is_made_of_samples():
    with pytest.raises(ValueError, match="empty list"):
        PaddedCollator()([])
    with pytest.raises(ValueError, match="a Pack is not a sample: pass PackedCollator"):
        PaddedCollator()([pack_of([3], 9)])
    with pytest.raises(ValueError, match="a Pack is not a sample"):
        PackedCollator()([pack_of([3], 9), {"input_ids": [1, 2]}])


@pytest.mark.parametrize("collator", [PackedCollator(), PaddedCollator()])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, "attention_mask contains 0"),
        (
            {"input_ids": [5, 6], "attention_mask": torch.tensor([1, 0])},
            "attention_mask contains 0",
        ),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, "completion_mask without labels"),
        ({"input_ids": [5, 6], "assistant_masks": [0, 1]}, "assistant_masks without labels"),
        ({"input_ids": [5, -6]}, "input_ids contains -6"),
        ({"input_ids": [5, 6], "labels": [5, -6]}, "labels contains -6"),
        ({"input_ids": [5.0, 6.0]}, "input_ids must be integers"),
        ({"input_ids": [5, 6], "label": "good"}, "label is 'good': pass the number of a class"),
        ({"input_ids": [5, 6], "label_ids": [1]}, "label_ids has 1 integers, but the document 2"),
        ([5, 6], "a row must be a dict"),
    ],
)
def test_what_packing_refuses_is_refused_of_plain_rows_too(collator, row, told):
    with pytest.raises(ValueError, match=told):
        collator([{"input_ids": [1, 2]}, row])


def test_labels_of_documents_reach_the_batch_and_are_not_padded():
    rows = [{"input_ids": [5, 6], "label": 2}, {"input_ids": [7], "label_ids": 0}]
    assert PackedCollator()(rows)["labels"].tolist() == [2, 0]
    rows = [{"input_ids": [5, 6], "label": [2, IGNORE_INDEX]}, {"input_ids": [7], "label": [1]}]
    batch = PackedCollator()(rows)
    assert batch["labels"].tolist() == [[2, IGNORE_INDEX, 1]]
    assert batch["loss_weights"].tolist() == [[1, 0, 1]]
    with pytest.raises(ValueError, match="PaddedCollator is for causal LMs"):
        PaddedCollator()(rows)
    with pytest.raises(ValueError, match="some documents have one label"):
        PackedCollator()([rows[0], {"input_ids": [7], "label": 1}])


def test_a_mask_that_says_no_more_than_the_labels_may_stand_beside_them():
    row = {
        "input_ids": [5, 6, 7],
        "completion_mask": [0, 0, 1],
        "labels": [IGNORE_INDEX, IGNORE_INDEX, 7],
    }
    assert PackedCollator()([row])["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 7]]


def test_the_batch_equals_that_of_the_stock_flattening_collator():
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}, {"input_ids": [12]}]
    stock = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    ours = PackedCollator()(rows)
    for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert ours[key].tolist() == stock[key].tolist(), key
    assert ours["max_length_q"] == int(stock["max_length_q"])


def test_sample_weights_give_every_sequence_the_same_weight():
    batch = PackedCollator(mean="sample")(pack_of([2, 7, 3], 16))
    weights, cu = batch["loss_weights"].flatten(), batch["cu_seq_lens_q"].tolist()
    sums = [weights[a:b].sum().item() for a, b in itertools.pairwise(cu)]
    assert np.allclose(sums, 1.0)


@pytest.mark.parametrize("pretokenize", [True, False])
@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
@pytest.mark.parametrize("marked", [False, True])
def test_the_parts_of_a_split_sample_weigh_what_they_would_in_one_piece(
    pretokenize, strategy, marked
):
    rows = [{"input_ids": [n + 1] * length} for n, length in enumerate((20, 4, 9, 8))]
    if marked:
        rows[0]["labels"] = [IGNORE_INDEX] * 15 + [1] * 5
    data = PackedDataset(
        rows, budget=8, strategy=strategy, pretokenize=pretokenize, shards=1, shuffle=False, pool=4
    )
    collators = PackedCollator(mean="sample"), PackedCollator(mean="sample", fixed_sequences=8)
    whole = {1: 5 if marked else 19, 2: 3, 3: 8, 4: 7}
    for collator in collators:
        for batch in map(collator, data):
            ids, labels, weights = (
                batch[name][0].tolist() for name in ("input_ids", "labels", "loss_weights")
            )
            pairs = zip(ids, labels, strict=True)
            wanted = [0 if label == IGNORE_INDEX else 1 / whole[token] for token, label in pairs]
            assert np.allclose(weights, wanted)
    packs = list(data)
    stacked = PackedCollator(mean="sample", stack=True)(packs)["loss_weights"]
    alone = [
        PackedCollator(mean="sample", pad_to_budget=True)(pack)["loss_weights"][0] for pack in packs
    ]
    assert torch.equal(stacked, torch.stack(alone))


def test_each_further_part_of_a_sample_weighs_one_token_less():
    data = PackedDataset([[1] * 20], budget=8)
    weights = [PackedCollator(mean="sample")(pack)["loss_weights"].sum().item() for pack in data]
    assert len(weights) == 3 and np.isclose(sum(weights), (20 - 3) / 19)


def test_a_truncated_sample_weighs_as_a_whole_one():
    for pretokenize in (True, False):
        data = PackedDataset(
            [[1] * 20], budget=8, overflow="truncate", pretokenize=pretokenize, shards=1
        )
        (weights,) = (PackedCollator(mean="sample")(pack)["loss_weights"] for pack in data)
        assert np.isclose(weights.sum(), 1.0)


def test_padded_rows_hold_the_same_samples():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    batch = PaddedCollator(pad_token_id=1, pad_to_multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 1]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [-100, -100, -100, -100]]
