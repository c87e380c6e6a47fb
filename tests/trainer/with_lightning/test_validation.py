"""Lightning's validation: the mean of what was looked at, however little, before a training too."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from front_ends import Noting
from nopad.collators import PackedCollator
from nopad.packing import IGNORE_INDEX
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Validated(Noting):
    """Logs what it is validated on, too."""

    def validation_step(self, batch, _):
        self.log("val", self.model(**batch).loss, batch_size=1)


def trainer(packs: PackedDataModule, **settings) -> pl.Trainer:
    quiet: dict[str, Any] = {f"enable_{name}": False for name in ("progress_bar", "model_summary")}
    quiet |= {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(callbacks=[PackedCallback(packs, check=False)], **quiet, **settings)


def data(mean: str = "token", **settings) -> PackedDataModule:
    collator = PackedCollator(mean=mean)
    return PackedDataModule(tiny_run.dataset(14, **settings), tiny_run.dataset(20), collator)


@torch.no_grad()
def exact(packs: int, mean: str) -> float:
    """The mean loss of the first packs, every sequence run alone."""
    model, total, count = tiny_run.model(), 0.0, 0
    for pack in tiny_run.packs(tiny_run.dataset(20), packs):
        for a, b in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            ids, labels = (
                torch.from_numpy(x[a:b].copy())[None] for x in (pack.tokens, pack.labels)
            )
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="none")
            counted = losses[labels[0, 1:] != IGNORE_INDEX]
            if len(counted):
                total += float(counted.sum() if mean == "token" else counted.mean())
                count += len(counted) if mean == "token" else 1
    return total / count


@pytest.mark.parametrize("mean", ["token", "sample"])
@pytest.mark.parametrize(
    ("settings", "packs"),
    [({}, 99), ({"limit_val_batches": 3}, 3), ({"fast_dev_run": True}, 1)],
    ids=["whole", "limited", "fast_dev_run"],
)
def test_a_validation_gives_the_mean_of_the_packs_it_looked_at(mean, settings, packs):
    module, given = Validated(), data(mean)
    (found,) = trainer(given, **settings).validate(module, given, verbose=False)
    assert found["val"] == pytest.approx(exact(packs, mean), rel=1e-5)


def test_a_limited_validation_inside_a_training_is_as_exact():
    module, given = Validated(), data()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    run = trainer(given, max_epochs=1, limit_val_batches=2, num_sanity_val_steps=1)
    run.fit(module, given)
    assert float(run.callback_metrics["val"]) == pytest.approx(exact(2, "token"), rel=1e-5)


@pytest.mark.parametrize("epochs", [1, None])
def test_batches_to_overfit_on_are_the_same_in_every_epoch(epochs):
    module, given = Validated(), data(epochs=epochs)
    trainer(given, max_epochs=3, overfit_batches=2).fit(module, given)
    whole = [pack.tokens.tolist() for pack in tiny_run.packs(tiny_run.dataset(14), 2)]
    assert module.batches == whole * 3
