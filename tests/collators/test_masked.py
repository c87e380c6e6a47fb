"""Masks of documents: reproducible, whoever reads the packs, and never of special tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nopad.collators import MaskedCollator, PackedCollator
from nopad.packing import PackedDataset

ROWS = [{"input_ids": [0, *range(5, 5 + n % 30 + 1), 2]} for n in range(60)]


class Tokenizer:
    mask_token_id, all_special_ids = 4, (0, 1, 2, 3, 4)

    def __len__(self) -> int:
        return 61


def masked(data, **options) -> list[tuple[list, list]]:
    collator = MaskedCollator(Tokenizer(), seed=2)
    batches = (PackedCollator(**options)(pack) | collator(pack) for pack in data)
    return [(b["input_ids"].tolist(), b["labels"].tolist()) for b in batches]


def test_masks_do_not_depend_on_ranks_or_on_where_a_run_was_resumed():
    whole = masked(PackedDataset(ROWS, budget=64))
    ranks = [masked(PackedDataset(ROWS, budget=64, rank=r, world_size=2)) for r in range(2)]
    assert [batch for pair in zip(*ranks, strict=True) for batch in pair][: len(whole)] == whole
    first, rest = PackedDataset(ROWS, budget=64), PackedDataset(ROWS, budget=64)
    reader = iter(first)
    before = masked([next(reader) for _ in range(3)])
    rest.load_state_dict(first.state_dict())
    assert before + masked(rest) == whole
    other_epoch = PackedDataset(ROWS, budget=64, epochs=2)
    assert masked(other_epoch)[len(whole) :] != whole


def test_chosen_tokens_are_replaced_and_predicted_as_bert_does():
    pack = next(iter(PackedDataset([list(range(5, 61))] * 400, budget=1 << 15)))
    batch = MaskedCollator(Tokenizer(), pad_to_budget=True)(pack)
    ids, labels = batch["input_ids"].numpy()[0], batch["labels"].numpy()[0]
    tokens = pack.tokens
    ids, labels, rest = ids[: len(tokens)], labels[: len(tokens)], labels[len(tokens) :]
    chosen = labels != -100
    assert (rest == -100).all() and (ids[~chosen] == tokens[~chosen]).all()
    assert (labels[chosen] == tokens[chosen]).all()
    assert chosen.mean() == pytest.approx(0.15, abs=0.02)
    assert (ids[chosen] == 4).mean() == pytest.approx(0.8, abs=0.04)
    assert (ids[chosen] == tokens[chosen]).mean() == pytest.approx(0.1, abs=0.04)
    assert batch["loss_weights"].sum() == chosen.sum()


def test_special_tokens_are_never_chosen_and_plain_rows_draw_from_torch():
    collator = MaskedCollator(Tokenizer(), probability=0.99)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        batch = collator(ROWS)
        draws.append(batch["input_ids"])
        special = np.isin(PackedCollator()(ROWS)["input_ids"].numpy(), [0, 2])
        assert (batch["labels"].numpy()[special] == -100).all()
    assert torch.equal(*draws)


@pytest.mark.parametrize(
    ("tokenizer", "options", "told"),
    [
        (object(), {}, "has no mask token"),
        (Tokenizer(), {"probability": 1.5}, "probability=1.5: pass a number"),
        (Tokenizer(), {"seed": -1}, "seed=-1: pass an integer"),
        (Tokenizer(), {"mean": "sample"}, "mean='sample': a masked LM"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tokenizer, options, told):
    with pytest.raises(ValueError, match=told):
        MaskedCollator(tokenizer, **options)
