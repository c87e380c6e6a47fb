"""The same run in every layout: packs, losses, gradients, completions; killed, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
from layouts_child import SAVED_AT

CHILD = Path(__file__).parent / "support" / "layouts_child.py"
LAYOUTS = ["dp2", "sp2", "tp2", "fsdp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model, the gradients of one rank, and what a killed run has saved."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny_run.model().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def one(folder):
    return tiny_run.launch(CHILD, folder, "one1", world=1)[0]["one1"]


@pytest.fixture(scope="module")
def two(folder, one):
    """What two ranks saw in each layout, and what those of a killed run saw who went on."""
    killed = tiny_run.launch(CHILD, folder, "dp2,fp64,killed", check=False)
    assert [code for code, *_ in killed] == [-9, -9]
    return tiny_run.launch(CHILD, folder, *LAYOUTS, "resumed sp2", "sp2,fp32")


def assert_same(run: dict, one: dict, done: int = 0) -> None:
    assert run["packs"] == one["packs"][done:]
    assert run["losses"] == pytest.approx(one["losses"][done:], rel=1e-12)
    assert run["distance"] < 1e-10
    assert run["completions"] == one["completions"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(one, two, layout):
    for child in two:
        assert_same(child[layout], one)


def test_in_fp32_gradients_differ_by_rounding(one, two):
    assert all(child["sp2,fp32"]["distance"] < 2e-6 for child in two)


def test_a_killed_data_parallel_run_goes_on_in_another_layout(folder, one, two):
    for child in two:
        assert_same(child["resumed sp2"], one, SAVED_AT)
    (alone,) = tiny_run.launch(CHILD, folder, "resumed one1", world=1)
    assert_same(alone["resumed one1"], one, SAVED_AT)


def test_four_ranks_train_as_one(folder, one):
    for child in tiny_run.launch(CHILD, folder, "sp2", world=4):
        assert_same(child["sp2"], one)


@pytest.mark.slow
def test_four_ranks_train_as_one_in_more_layouts(folder, one):
    for child in tiny_run.launch(CHILD, folder, "dp4", "sp4", world=4):
        assert_same(child["dp4"], one)
        assert_same(child["sp4"], one)
