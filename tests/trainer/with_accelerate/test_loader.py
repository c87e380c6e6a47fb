"""Accelerate, on one and two ranks: exact gradients, equal curves, resumed ≡ uninterrupted.

Loops of one's own may validate, stop and start anywhere: the weights are those of one document at a
time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from accelerate import Accelerator, ParallelismConfig, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_accelerate import loader as loader_module

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
        assert len(child["gradients"]) == 4
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
    from accelerate import DataLoaderConfiguration

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**setting))
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name}=.* does not apply to packs"):
        PackedAccelerateLoader(accelerator, tiny_run.dataset())


RATE = 0.1


class Loop:
    """A loop as in the documentation, over 15 packs in steps of 3."""

    def __init__(self, accumulation: int = 3):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = tiny_run.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader = PackedAccelerateLoader(self.accelerator, tiny_run.dataset(), check=False)
        self.steps: list[int] = []
        self.batches = 0

    def train(self, batch: dict) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(**batch).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.batches += 1
        if self.accelerator.sync_gradients:
            self.steps.append(self.batches)

    def distance(self, accumulation: int = 3) -> float:
        """How far the weights are from those of one document at a time."""
        gold, packs = tiny_run.model(), list(tiny_run.dataset())
        for start in range(0, len(packs), accumulation):
            gradient = tiny_run.gold_gradient(gold, packs[start : start + accumulation])
            with torch.no_grad():
                for name, parameter in gold.named_parameters():
                    parameter -= RATE * gradient[name]
        ours = dict(self.accelerator.unwrap_model(self.model).named_parameters())
        return max(float((p - ours[n]).detach().abs().max()) for n, p in gold.named_parameters())


def validate_without_gradients(loop: Loop, held_out) -> None:
    with torch.no_grad():
        for batch in held_out:
            loop.model(**batch)


def validate_inside(loop: Loop, held_out) -> None:
    for batch in held_out:
        with torch.no_grad():
            loop.model(**batch)


def leave_early(loop: Loop, held_out) -> None:
    for batch in held_out:
        with torch.no_grad():
            loop.model(**batch)
        if held_out.last_pack.index == 1:
            break


KEPT: list = []


def keep_the_iterator(loop: Loop, held_out) -> None:
    """Its last batch is issued and it has not ended: Accelerate would sync ever after."""
    KEPT[:] = [iter(held_out)]
    for _ in range(9):
        next(KEPT[0])


@pytest.mark.parametrize(
    "validate", [validate_without_gradients, validate_inside, leave_early, keep_the_iterator]
)
def test_a_validation_inside_a_step_moves_no_optimizer_step(validate):
    loop = Loop()
    held_out = PackedAccelerateLoader(loop.accelerator, tiny_run.dataset(20), check=False)
    for batch in loop.loader:
        loop.train(batch)
        if loop.batches % 4 == 0:
            validate(loop, held_out)
    KEPT.clear()
    assert loop.steps == [3, 6, 9, 12, 15]
    assert loop.distance() < 1e-6


@pytest.mark.parametrize(("accumulation", "trained"), [(3, 4), (3, 5), (3, 6), (1, 4)])
def test_a_step_that_a_loop_has_left_is_trained_again(accumulation, trained):
    loop = Loop(accumulation)
    for batch in loop.loader:
        if loop.batches == trained:  # one more was read, and is not trained
            break
        loop.train(batch)
    for batch in loop.loader:
        loop.train(batch)
    assert loop.distance(accumulation) < 1e-6
    assert next(iter(loop.loader))["input_ids"].tolist() != batch["input_ids"].tolist()


def test_a_left_step_whose_gradients_cannot_go_is_refused(monkeypatch):
    loop = Loop()
    loop.train(next(batches := iter(loop.loader)))
    batches.close()
    sharded = DistributedType.FSDP
    monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", sharded)
    with pytest.raises(ValueError, match="left inside an optimizer step, and FSDP still holds"):
        next(iter(loop.loader))


def test_an_accumulation_that_changes_after_the_loader_was_made_is_refused():
    loop = Loop(accumulation=2)
    loop.accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4, but .* in steps of 2"):
        next(iter(loop.loader))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_validation_gives_the_token_mean_whatever_the_accumulation(accumulation):
    loop, held_out = Loop(accumulation), tiny_run.dataset(20, seed=9)
    validation = loop.loader.validation(held_out)
    with torch.no_grad():
        found = [torch.stack([loop.model(**batch).loss for batch in validation]) for _ in "12"]
    whole = tiny_run.collate(list(tiny_run.dataset(20, seed=9)))
    exact = float(tiny_run.model()(**whole).loss.detach())
    assert [float(losses.mean()) for losses in found] == pytest.approx([exact] * 2, rel=1e-6)
    assert len(found[0]) == len(validation) > 2, "of a single pack, any mean is exact"


def test_a_validation_of_plain_rows_is_packed_and_not_saved(tmp_path):
    loop = Loop()
    validation = loop.loader.validation(tiny_run.samples(20, seed=5), limit=2)
    assert len(list(validation)) == 2
    assert validation.dataset.settings["budget"] == tiny_run.BUDGET
    loop.accelerator.save_state(str(tmp_path))
    assert len(list(tmp_path.glob("nopad_data*"))) == 1


def test_an_id_outside_the_vocabulary_is_refused_in_a_validation():
    rows = [[5, 6, tiny_run.VOCABULARY + 9, 7]] * 4
    loader = PackedAccelerateLoader(Loop().accelerator, tiny_run.dataset())
    with pytest.raises(ValueError, match="outside the model's vocabulary"), torch.no_grad():
        list(loader.validation(rows))


def test_a_loss_that_was_detached_between_two_loops_is_attached_again():
    loop = Loop()
    next(iter(loop.loader))
    loop.accelerator.unwrap_model(loop.model).nopad_loss.detach()
    batch = next(iter(loop.loader))
    assert loop.model(**batch).loss.isfinite() and loop.model.nopad_loss is not None


def test_skip_first_batches_says_that_the_loader_continues_by_itself():
    loop = Loop()
    for function in (skip_first_batches, loop.accelerator.skip_first_batches):
        with pytest.raises(ValueError, match=r"^skip_first_batches does not apply to packs"):
            function(loop.loader, 2)


@pytest.mark.parametrize("own", [True, False])
def test_a_loss_of_ones_own_is_told_once_how_to_be_exact(own, capsys):
    loop, total = Loop(), torch.nn.functional.cross_entropy
    for batch in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            if own:
                labels = batch.pop("labels")[0, 1:]
                logits = loop.model(**batch).logits[0, :-1]
                loss = total(logits, labels, reduction="sum") / batch["num_items_in_batch"]
            else:
                loss = loop.model(**batch).loss
            loop.accelerator.backward(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert loop.distance() < 1e-6
    assert capsys.readouterr().out.count("by batch['num_items_in_batch']") == own


def test_context_parallelism_is_refused_where_the_loss_spreads_packs():
    class Plain:
        parallelism_config = ParallelismConfig(cp_size=2)

    loader_module._refuse_context_parallel(plain := Plain())
    with pytest.raises(ValueError, match="maybe_context_parallel would attend across"):
        plain.maybe_context_parallel()
