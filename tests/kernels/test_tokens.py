"""Argmax, last-token lookup, embedding and copies against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import argmax, argmax_into, copy_words, embed, fill_last_tokens

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(("rows", "vocab_size"), [(2, 61), (3, 5000)])
def test_the_first_of_the_largest_logits_is_taken_and_nan_yields_minus_one(rows, vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab_size).round(decimals=1)
    assert_close(argmax(logits), logits.max(dim=-1).indices)
    logits[1, 7], logits[0] = float("nan"), float("-inf")
    assert argmax(logits)[:2].tolist() == [0, -1]


@pytest.mark.parametrize("slot", [0, 2, -1])
def test_tokens_are_kept_for_the_next_step_and_for_the_host(slot):
    torch.manual_seed(0)
    logits = torch.randn(4, 3000)
    logits[2, 7] = float("nan")
    rows, last_tokens = torch.tensor([5, 0, 3, 6]), torch.full((7,), -9)
    host_tokens = torch.full((3, 3), -9)  # fewer columns than rows of logits
    got = argmax_into(logits, rows, last_tokens, torch.tensor([slot]), host_tokens)
    assert_close(got, argmax(logits))
    assert got[2] == -1
    kept = got.clamp(min=0).tolist()
    assert last_tokens.tolist() == [kept[1], -9, -9, kept[2], -9, kept[0], kept[3]]
    want = torch.full((3, 3), -9)
    if slot >= 0:
        want[slot] = got[:3]
    assert_close(host_tokens, want)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_words_are_copied_and_nothing_beyond(count):
    source, target = torch.arange(count) - 5, torch.full((count + 1,), 99)
    copy_words(source, target)
    assert target.tolist() == [*source.tolist(), 99]


def test_ids_below_zero_are_the_last_tokens_of_their_rows():
    last_tokens = torch.arange(10) * 100
    ids = torch.tensor([5, -1, -10, 7, -3])
    assert fill_last_tokens(ids, last_tokens).tolist() == [5, 0, 900, 7, 200]


def test_rows_of_the_embedding_table_are_looked_up():
    weight = torch.randn(20, 24)
    assert_close(embed(torch.tensor([3, 19, 0]), weight), weight[[3, 19, 0]])
