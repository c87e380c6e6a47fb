"""Lightning, on one and two ranks: exact gradients, equal curves, resumed ≡ uninterrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

CHILD = Path(__file__).parents[1] / "support" / "lightning_child.py"


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


def test_a_pickled_data_module_still_has_no_validation():
    import pickle

    pl = pytest.importorskip("lightning.pytorch", reason="this is about lightning")
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from nopad.trainer.with_lightning import PackedDataModule

    for data, has in ((None, False), (tiny_run.dataset(), True)):
        module = PackedDataModule(tiny_run.dataset(), data)
        for made in (module, pickle.loads(pickle.dumps(module))):
            assert is_overridden("val_dataloader", made, pl.LightningDataModule) is has


def test_an_exception_ends_the_validation():
    from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
    from nopad.trainer.with_lightning.packed_callback import ACCUMULATION_KEY, DATA_KEY, RNG_KEY

    nobody: Any = None
    callback = PackedCallback(PackedDataModule(tiny_run.dataset()))
    callback.on_validation_start(nobody, nobody)
    assert callback.meter._pause_depth == 1
    callback.on_exception(nobody, nobody, ValueError())
    assert callback.meter._pause_depth == 0 < callback.meter._paused_seconds
    keys = {DATA_KEY, ACCUMULATION_KEY, RNG_KEY}
    assert keys == {"nopad_data", "nopad_accumulation", "nopad_random"}, "a format: bump it"
    for name in keys:
        others = {other: {} for other in keys - {name}}
        with pytest.raises(ValueError, match=rf"no data position \({name}\)"):
            callback.on_load_checkpoint(nobody, nobody, others)


def test_the_log_has_the_loss_of_the_whole_step(tmp_path):
    import lightning.pytorch as pl
    from front_ends import lightning

    class Read(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            self.told = float(trainer.callback_metrics["train/loss"])

    read, model = Read(), tiny_run.model()
    batch = tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 3))
    exact = float(model(**batch).loss)
    lightning(model, tiny_run.dataset(), tmp_path, 3, read, log_every_n_steps=1)
    assert read.told == pytest.approx(exact, rel=1e-5)


def test_labels_are_smoothed_as_in_the_hf_trainer(tmp_path):
    from front_ends import hf, lightning

    plain = hf(tiny_run.model(), tiny_run.dataset(), tmp_path)
    theirs = hf(tiny_run.model(), tiny_run.dataset(), tmp_path, label_smoothing_factor=0.1)
    ours = lightning(tiny_run.model(), tiny_run.dataset(), tmp_path, loss={"label_smoothing": 0.1})
    assert tiny_run.distance(ours, theirs) < 2e-6 < 1e-3 < tiny_run.distance(ours, plain)


def test_a_trainer_that_logs_never_trains_all_the_same(tmp_path):
    from front_ends import lightning

    model = tiny_run.model()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 2))
    ours = lightning(model, tiny_run.dataset(), tmp_path, log_every_n_steps=0)
    assert tiny_run.distance(ours, gold) < 2e-6


def test_who_optimizes_by_hand_may_return_what_they_like(tmp_path):
    from front_ends import Module
    from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
    from nopad.trainer.with_lightning.packed_callback import pl

    class ByHand(Module):
        automatic_optimization = False

        def training_step(self, batch, _):
            self.manual_backward(self.model(**batch).loss)
            self.optimizers().step()
            return {"seen": 1}

    packs, quiet = (
        PackedDataModule(tiny_run.dataset()),
        {"logger": False, "default_root_dir": tmp_path},
    )
    quiet |= {f"enable_{name}": False for name in ("checkpointing", "progress_bar")}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, callbacks=[PackedCallback(packs)], **quiet
    )
    trainer.fit(ByHand(tiny_run.model()), packs)
    assert trainer.global_step == 2


def test_a_stop_callback_gives_the_signals_back_when_training_fails(tmp_path):
    import signal

    import lightning.pytorch as pl
    from front_ends import lightning
    from nopad.trainer.with_lightning import StopCallback

    class Broken(pl.Callback):
        def on_train_batch_end(self, *_):
            raise KeyError("broken")

    before = signal.getsignal(signal.SIGUSR1)
    stop = StopCallback(tmp_path / "last.ckpt")
    with pytest.raises(KeyError, match="broken"):
        lightning(tiny_run.model(), tiny_run.dataset(), tmp_path, 1, stop, Broken())
    assert signal.getsignal(signal.SIGUSR1) == before


def test_unequal_packs_end_cleanly_on_all_ranks(two):
    assert two[0]["ends"] == two[1]["ends"] > 0


def test_the_validation_loss_is_the_token_mean(two):
    for child in two:
        got, wanted = child["validated"]
        assert abs(got - wanted) < 1e-5 * wanted
