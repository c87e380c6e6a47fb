"""Lightning's epochs: every pack is trained on once and in order, whatever begins or ends them."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import tiny_run
from echo_eval import EXAMPLES, echo, equal
from front_ends import Noting
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from nopad.packing import PackedDataset
from nopad.trainer.evaluation import GenerationEval
from nopad.trainer.with_lightning import EvalCallback, PackedCallback, PackedDataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def dataset(kind: str = "finite") -> PackedDataset:
    if kind == "stream":
        rows = [row["input_ids"] for row in tiny_run.samples(14)]
        settings = {"shards": 2, "pretokenize": False, "shuffle": False}
        return PackedDataset(lambda: iter(rows), budget=tiny_run.BUDGET, **settings)
    settings = {
        "finite": {},
        "endless": {"epochs": None},
        "packs": {"epochs": None, "max_packs": 8},
    }
    return tiny_run.dataset(14, **settings[kind])


def trainer(packs: PackedDataModule, *callbacks, **settings) -> pl.Trainer:
    quiet = {f"enable_{name}": False for name in ("progress_bar", "model_summary")}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    callbacks = [PackedCallback(packs, check=False), *callbacks]
    quiet |= {"logger": False, "enable_checkpointing": saves, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(callbacks=callbacks, **quiet, **settings)


def trained(data: PackedDataset, *callbacks, checkpoint=None, workers=0, **settings) -> list:
    """The batches of a run, in their order."""
    packs, module = PackedDataModule(data, num_workers=workers), Noting()
    trainer(packs, *callbacks, **settings).fit(module, packs, ckpt_path=checkpoint)
    return module.batches


def refused(*callbacks, **settings) -> str:
    packs, module = PackedDataModule(dataset()), Noting()
    with pytest.raises(ValueError) as said:
        trainer(packs, *callbacks, max_epochs=2, **settings).fit(module, packs)
    assert module.batches == []
    return str(said.value)


def test_an_epoch_that_would_end_inside_a_step_is_refused():
    said = refused(limit_train_batches=10, accumulate_grad_batches=4)
    assert "limit_train_batches=10" in said and "accumulate_grad_batches=4" in said
    assert "such as 8" in said
    assert "such as 4" in refused(limit_train_batches=3, accumulate_grad_batches=4)
    settings = {"limit_train_batches": 8, "accumulate_grad_batches": 4, "max_epochs": 2}
    assert trained(dataset("endless"), **settings) == trained(dataset("endless"), max_steps=16)


def test_a_look_whether_a_run_would_work_may_end_inside_a_step():
    assert len(trained(dataset(), fast_dev_run=1, accumulate_grad_batches=4)) == 1


@pytest.mark.parametrize("schedule", [{0: 2, 1: 4}, {4: 2}, {0: 4}])
def test_an_accumulation_that_changes_from_epoch_to_epoch_is_refused(schedule):
    said = refused(GradientAccumulationScheduler(schedule))
    assert f"GradientAccumulationScheduler({schedule})" in said
    assert "accumulate_grad_batches=" in said


def test_an_accumulation_of_one_may_be_scheduled():
    assert len(trained(dataset(), GradientAccumulationScheduler({0: 1}), max_steps=3)) == 3


def test_an_accumulation_that_is_changed_by_hand_is_refused():
    class Change(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.accumulate_grad_batches = 3

    said = refused(Change(), accumulate_grad_batches=2)
    assert "accumulate_grad_batches=3" in said and "in steps of 2" in said


@pytest.mark.parametrize(
    ("kind", "accumulation"), [("finite", 1), ("finite", 2), ("packs", 1), ("stream", 1)]
)
@pytest.mark.parametrize("limit", [2, 1.0])
def test_reloaded_loaders_go_on_where_the_one_before_stood(kind, accumulation, limit):
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulation}
    settings["limit_train_batches"] = limit
    whole = trained(dataset(kind), **settings)
    assert len(whole) > 4
    assert trained(dataset(kind), reload_dataloaders_every_n_epochs=1, **settings) == whole


def test_a_stream_ends_the_training_before_max_steps(tmp_path, capsys):
    packs = trained(dataset("stream"), max_epochs=1)
    evaluation = EvalCallback(GenerationEval(echo, EXAMPLES, {"equal": equal}, every=1000))
    saves = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=len(packs))
    assert trained(dataset("stream"), evaluation, saves, max_steps=50) == packs
    out = capsys.readouterr().out
    assert f"training ends at step {len(packs)}, not 50" in out and "to its end" not in out
    assert evaluation._last_run == {"": len(packs)}
    last = tmp_path / "last.ckpt"
    assert trained(dataset("stream"), max_steps=50, checkpoint=last) == []
    assert len(trained(dataset("stream"), max_epochs=2, max_steps=50)) > len(packs)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_that_max_steps_ends_says_so_and_reports_its_packs(accumulation, capsys):
    data = dataset("stream")
    packs = trained(data, max_steps=2, accumulate_grad_batches=accumulation)
    assert data.report()["packs"] == len(packs) == 2 * accumulation
    assert f"ended the training after {len(packs)} packs" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [2, 1.0])
def test_loaders_with_workers_are_reloaded_where_they_stood(limit):
    settings = {"max_epochs": 2, "limit_train_batches": limit}
    again = {"reload_dataloaders_every_n_epochs": 1, "workers": 1}
    assert trained(dataset(), **settings, **again) == trained(dataset(), **settings)


def test_a_reloaded_loader_is_the_one_whose_waiting_is_told():
    class Reads(pl.Callback):
        met = ()

        def on_train_batch_start(self, trainer, *_):
            packs = trainer.datamodule.loader
            packs.wait_seconds += 1.0
            self.met += (trainer.callbacks[0].meter._wait_seconds() == packs.wait_seconds,)

    reads = Reads()
    trained(dataset(), reads, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert len(reads.met) > 6 and all(reads.met)


def test_packs_to_validate_on_are_there_without_a_trainer():
    packs = PackedDataModule(dataset(), dataset())
    assert len(list(packs.val_dataloader())) == len(list(dataset()))


def test_other_data_begins_at_its_beginning_where_loaders_are_reloaded():
    class Swap(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.datamodule.train_dataset = tiny_run.dataset(9)

    settings = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    seen = trained(dataset(), Swap(), **settings)
    assert seen == trained(dataset(), max_epochs=1) + trained(tiny_run.dataset(9), max_epochs=1)


def test_a_second_fit_goes_on_where_the_first_ended():
    whole = trained(dataset("endless"), max_steps=9)
    packs, module = PackedDataModule(dataset("endless")), Noting()
    for _ in range(3):
        trainer(packs, max_steps=3).fit(module, packs)
    assert module.batches == whole


def test_a_batch_that_the_module_left_out_comes_again():
    class Leave(Noting):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if (self.current_epoch, batch_idx) == (0, 2) else None

    packs, module = PackedDataModule(dataset()), Leave()
    trainer(packs, max_epochs=2).fit(module, packs)
    assert module.batches == trained(dataset(), max_epochs=1)
    assert packs.loader is not None and packs.loader.trained_state is not None
    assert packs.loader.trained_state["position"]["index"] == len(module.batches)


@pytest.mark.parametrize(
    ("kind", "workers"), [("finite", 0), ("finite", 1), ("packs", 0), ("stream", 0)]
)
def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(kind, workers, tmp_path):
    whole = trained(dataset(kind), max_epochs=2)
    first = trained(dataset(kind), ModelCheckpoint(tmp_path, filename="epoch"), max_epochs=1)
    settings = {"checkpoint": tmp_path / "epoch.ckpt", "max_epochs": 2, "workers": workers}
    assert first + trained(dataset(kind), **settings) == whole


def test_a_checkpoint_at_the_last_step_of_an_epoch_goes_on(tmp_path):
    whole, epoch = trained(dataset(), max_epochs=2), dataset().count()
    save = ModelCheckpoint(tmp_path, filename="step", every_n_train_steps=epoch)
    first = trained(dataset(), save, max_epochs=1)
    assert first + trained(dataset(), checkpoint=tmp_path / "step.ckpt", max_epochs=2) == whole


@pytest.mark.parametrize(
    "setting", [{"limit_train_batches": 0.5}, {"overfit_batches": 0.5}, {"val_check_interval": 0.5}]
)
def test_a_fraction_of_packs_that_nobody_counts_is_refused(setting):
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match=r"`1\.0` or an int"):
        trained(dataset(), max_epochs=1, **setting)
