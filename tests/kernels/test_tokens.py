"""Argmax, last-token lookup and embedding against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import argmax, embed, fill_last_tokens

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(("rows", "vocab_size"), [(2, 61), (3, 5000)])
def test_the_first_of_the_largest_logits_is_taken_and_nan_yields_minus_one(rows, vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab_size).round(decimals=1)
    assert_close(argmax(logits), logits.max(dim=-1).indices)
    logits[1, 7], logits[0] = float("nan"), float("-inf")
    assert argmax(logits)[:2].tolist() == [0, -1]


def test_ids_below_zero_are_the_last_tokens_of_their_rows():
    last_tokens = torch.arange(10) * 100
    ids = torch.tensor([5, -1, -10, 7, -3])
    assert fill_last_tokens(ids, last_tokens).tolist() == [5, 0, 900, 7, 200]


def test_rows_of_the_embedding_table_are_looked_up():
    weight = torch.randn(20, 24)
    assert_close(embed(torch.tensor([3, 19, 0]), weight), weight[[3, 19, 0]])
