"""The same run in every layout: packs, losses, gradients, completions; killed, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run
from layouts_child import SAVED_AT

CHILD = Path(__file__).parent / "support" / "layouts_child.py"
LAYOUTS = ["dp2", "sp2", "tp2", "fsdp2"]
EXPERTS = [f"{layout},fp64,experts" for layout in ("dp2", "sp2", "fsdp2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model, the gradients of one rank, and what a killed run has saved."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny_run.model().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return tiny_run.launch(CHILD, folder, "one1", "one1,fp64,experts", world=1)[0]


@pytest.fixture(scope="module")
def one(alone):
    return alone["one1"]


@pytest.fixture(scope="module")
def two(folder, one):
    """What two ranks saw in each layout, and what those of a killed run saw who went on."""
    killed = tiny_run.launch(CHILD, folder, "dp2,fp64,killed", check=False)
    assert [code for code, *_ in killed] == [-9, -9]
    return tiny_run.launch(CHILD, folder, *LAYOUTS, *EXPERTS, "resumed sp2", "sp2,fp32")


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
    (resumed,) = tiny_run.launch(CHILD, folder, "resumed one1", world=1)
    assert_same(resumed["resumed one1"], one, SAVED_AT)


def test_four_ranks_train_as_one(folder, one):
    for child in tiny_run.launch(CHILD, folder, "sp2", world=4):
        assert_same(child["sp2"], one)


def test_the_auxiliary_loss_is_that_of_one_rank_in_every_layout(alone, two):
    one, packs = alone["one1,fp64,experts"], tiny_run.dataset(80, rank=0, world_size=1)
    model = tiny_run.mixture("eager").double()
    loss, aux_loss, _ = tiny_run.gold_mixture(model, tiny_run.packs(packs, 4))
    assert one["losses"][0] == pytest.approx(loss, rel=1e-6)  # stock losses are in fp32
    assert one["aux_losses"][0] == pytest.approx(aux_loss, rel=1e-6)
    for run in (child[case] for child in two for case in EXPERTS):
        assert run["packs"] == one["packs"] and run["distance"] < 2e-6
        assert run["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert run["aux_losses"] == pytest.approx(one["aux_losses"], rel=1e-6)


@pytest.mark.slow
def test_four_ranks_train_as_one_in_more_layouts(folder, one):
    for child in tiny_run.launch(CHILD, folder, "dp4", "sp4", world=4):
        assert_same(child["dp4"], one)
        assert_same(child["sp4"], one)
