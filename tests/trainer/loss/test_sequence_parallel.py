"""A row that is spread over two ranks has the loss and the gradients of the whole row."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated
import tiny_run
import torch
import torch.distributed as dist
from nopad.trainer.loss.sequence_parallel import RowShards

CHILD = Path(__file__).parents[1] / "layouts" / "support" / "row_shards_child.py"


@pytest.fixture(scope="module")
def two():
    return tiny_run.launch(CHILD)


def test_losses_and_gradients_are_those_of_the_whole_row(two):
    for child in two:
        assert len(child["distances"]) == 14
        for name, distance in child["distances"].items():
            # Gemma's norms sum in fp32, whatever the model's dtype.
            limit = 1e-6 if name in ("softcap, window", "gemma2, odd") else 1e-12
            assert distance < limit, (name, distance)


def test_what_cannot_be_spread_is_refused_with_the_reason(two):
    refusals = two[0]["refusals"]
    assert "needs attn_implementation='nopad'" in refusals["stock attention"]
    assert "3 attention heads cannot be shared by 2 sequence-parallel" in refusals["uneven heads"]
    assert "needs cu_seq_lens_q by name" in refusals["boundaries"]
    assert "seq_idx cannot be spread" in refusals["masks"]


def test_metrics_get_the_logits_of_the_whole_row(two):
    for child in two:
        shape, difference = child["logits"]
        assert shape == [1, 31, tiny_run.VOCABULARY] and difference < 1e-12


def test_a_model_that_counts_positions_itself_is_noticed(two):
    for child in two:
        right, wrong = child["start check"]
        assert right == 0.0 < wrong


def test_padding_is_a_document_of_its_own_without_labels():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_length_q": 3,
    }
    with simulated.ranks(2, rank=1):
        shards = RowShards(dist.group.WORLD)
        inputs = shards.split_inputs(batch)
        assert inputs["input_ids"].tolist() == [[8, 9, 0]]
        assert inputs["position_ids"].tolist() == [[0, 1, 0]]
        assert inputs["varlen"].cu_seqlens.tolist() == [0, 3, 5, 6]
        assert shards.split(torch.tensor([[1, 2, 3, 4, 5]]), -100).tolist() == [[4, 5, -100]]
