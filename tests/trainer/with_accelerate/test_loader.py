"""Accelerate, on one and two ranks: exact gradients, equal curves, resumed ≡ uninterrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_run

CHILD = Path(__file__).parents[1] / "support" / "accelerate_child.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder):
    return tiny_run.launch(CHILD, folder / "two", 2, world=2)


@pytest.fixture(scope="module")
def one(folder, two):
    return tiny_run.launch(CHILD, folder / "one", 1, folder / "two", world=1)


def test_the_gradient_of_a_step_is_that_of_its_samples_one_by_one(one, two):
    for child in (*one, *two):
        assert len(child["gradients"]) == 8
        for name, distance in child["gradients"].items():
            assert distance < 2e-6, name


def test_resumed_equals_uninterrupted_to_the_bit(one, two):
    for child in (*one, *two):
        assert child["resumed"]["parts"] == child["resumed"]["whole"]


def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(one, two):
    assert np.allclose(one[0]["curve"], two[0]["curve"], rtol=1e-5)
    assert two[0]["curve"] == two[1]["curve"]


def test_all_ranks_end_after_the_same_step(two):
    assert two[0]["ends"] == two[1]["ends"]
    assert min(two[0]["ends"]) > 0


def test_two_ranks_see_the_packs_of_one_in_turn(one, two):
    dealt = [[index for index in child["packs"] if index >= 0] for child in two]
    in_turn = [index for pair in zip(*dealt, strict=True) for index in pair]
    alone = [index for index in one[0]["packs"] if index >= 0]
    assert in_turn[: len(alone)] == alone == list(range(len(alone)))
    assert len(in_turn) - len(alone) < 2  # an empty pack evens the ranks out


def test_one_rank_goes_on_where_two_stopped(one, two):
    packs, losses = one[0]["moved"]
    whole = [child["resumed"]["whole"] for child in two]
    in_turn = [index for pair in zip(whole[0][0], whole[1][0], strict=True) for index in pair]
    assert packs == in_turn[12:] == list(range(12, 24))
    assert np.allclose(losses, whole[0][1][3:], rtol=1e-5)


def two_loaders(seeds: tuple[int, ...] = (3, 4)):
    from accelerate import Accelerator
    from nopad.trainer.with_accelerate import PackedAccelerateLoader

    accelerator = Accelerator(cpu=True)
    sets = [tiny_run.dataset(seed=seed, epochs=None) for seed in seeds]
    return accelerator, [PackedAccelerateLoader(accelerator, data, check=False) for data in sets]


@pytest.mark.parametrize("seeds", [(3, 4), (3, 3)])
def test_each_loader_of_a_run_goes_on_where_it_stood(seeds, tmp_path):
    accelerator, loaders = two_loaders(seeds)
    readers = [iter(loader) for loader in loaders]
    for reader, count in zip(readers, (4, 7), strict=True):
        for _ in range(count):
            next(reader)
    accelerator.save_state(str(tmp_path))
    wanted = [next(reader)["input_ids"].tolist() for reader in readers]
    accelerator, loaders = two_loaders(seeds)
    accelerator.load_state(str(tmp_path))
    assert [next(iter(loader))["input_ids"].tolist() for loader in loaders] == wanted


def test_a_run_with_another_number_of_loaders_is_not_resumed(tmp_path):
    accelerator, _ = two_loaders()
    accelerator.save_state(str(tmp_path))
    for count, message in ((1, "positions of 2 loaders, but 1 were"), (3, "2 loaders, but 3 were")):
        other, _ = two_loaders((3, 4, 5)[:count])
        with pytest.raises(ValueError, match=message):
            other.load_state(str(tmp_path))


@pytest.mark.parametrize(
    "setting", [{"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}]
)
def test_settings_of_accelerate_s_own_loader_are_refused(setting):
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from nopad.trainer.with_accelerate import PackedAccelerateLoader

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**setting))
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name}=.* does not apply to packs"):
        PackedAccelerateLoader(accelerator, tiny_run.dataset())
