"""Totals of Lightning's progress bars."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import tiny_run
from front_ends import Noting
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

pytestmark = pytest.mark.filterwarnings("ignore")


class Totals(pl.Callback):
    """Notes the totals that are shown, in order."""

    def __init__(self, bar):
        self.bar, self.train, self.validation = bar, [], []

    def on_train_batch_end(self, *_):
        self.train.append(self.bar.train_progress_bar.total)

    def on_validation_batch_end(self, *_):
        self.validation.append(self.bar.val_progress_bar.total)


class Validated(Noting):
    def validation_step(self, batch, _):
        return self.model(**batch).loss


@pytest.mark.parametrize("kind", ["TQDMProgressBar", "RichProgressBar"])
def test_the_bars_show_the_packs_of_the_pass_and_of_the_validation(kind, capfd):
    data, held = tiny_run.dataset(14), tiny_run.dataset(9)
    packs, bar = PackedDataModule(data, held), getattr(pl.callbacks, kind)()
    totals = Totals(bar)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, logger=False,
        callbacks=[PackedCallback(packs, check=False), bar, totals], accumulate_grad_batches=2,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Validated(), packs)
    steps = [-(-data.count(epoch) // 2) * 2 for epoch in range(2)]
    assert totals.train == [steps[0]] * steps[0] + [steps[1]] * steps[1]
    assert set(totals.validation[1:]) == {held.count()}


def test_without_end_the_bar_shows_the_steps_that_are_left(capfd):
    packs, bar = PackedDataModule(tiny_run.dataset(epochs=None)), pl.callbacks.TQDMProgressBar()
    totals = Totals(bar)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, accumulate_grad_batches=2,
        callbacks=[PackedCallback(packs, check=False), bar, totals],
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Noting(), packs)
    assert totals.train == [6] * 6
