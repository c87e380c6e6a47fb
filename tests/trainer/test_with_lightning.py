"""Lightning, on one and two ranks: exact gradients, equal curves, resumed ≡ uninterrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_run

CHILD = Path(__file__).parent / "lightning_child.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return tiny_run.launch(CHILD, tmp_path_factory.mktemp("one"), 1, world=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return tiny_run.launch(CHILD, tmp_path_factory.mktemp("two"), 2, world=2)


def test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one(two):
    for child in two:
        assert len(child["gradients"]) == 4
        for name, distance in child["gradients"].items():
            assert distance < 2e-6, name


def test_resumed_equals_uninterrupted_to_the_bit(two):
    for child in two:
        assert child["resumed"]["parts"] == child["resumed"]["whole"]


@pytest.mark.slow
def test_one_rank_finds_the_same(one, two):
    assert max(one[0]["gradients"].values()) < 2e-6
    assert one[0]["resumed"]["parts"] == one[0]["resumed"]["whole"]
    assert np.allclose(one[0]["curve"], two[0]["curve"], rtol=1e-5)


def test_unequal_packs_end_cleanly_on_all_ranks(two):
    assert two[0]["ends"] == two[1]["ends"] > 0


def test_the_validation_loss_is_the_token_mean(two):
    for child in two:
        got, wanted = child["validated"]
        assert abs(got - wanted) < 1e-5 * wanted
