"""Losses and optimizer steps of one's own in Lightning: exact, or told how to be."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from front_ends import Module
from lightning.pytorch.callbacks import BatchSizeFinder
from nopad.trainer.monitoring import NonFiniteError
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from torch.nn.functional import cross_entropy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")
PACKS = 4


def fit(module: pl.LightningModule, packs: PackedDataModule | None = None, *others, **settings):
    """Train one epoch: 15 packs, so that an empty one completes the last step of four."""
    packs = packs or PackedDataModule(tiny_run.dataset())
    quiet: dict[str, Any] = {f"enable_{name}": False for name in ("progress_bar", "model_summary")}
    quiet |= {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    callbacks = [PackedCallback(packs, check=False), *others]
    pl.Trainer(callbacks=callbacks, max_epochs=1, **quiet, **settings).fit(module, packs)


def distance(module: Any) -> float:
    """How far the weights are from those of one document at a time, in steps of four packs."""
    gold, packs = tiny_run.model(), list(tiny_run.dataset())
    for start in range(0, len(packs), PACKS):
        gradient = tiny_run.gold_gradient(gold, packs[start : start + PACKS])
        with torch.no_grad():
            for name, parameter in gold.named_parameters():
                parameter -= 0.1 * gradient[name]
    ours = dict(module.model.named_parameters())
    return max(float((p - ours[n]).detach().abs().max()) for n, p in gold.named_parameters())


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.model(**batch).loss / PACKS)
        if (batch_idx + 1) % PACKS == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_an_accumulation_of_ones_own_is_exact_where_the_data_knows_of_it():
    module = ByHand(tiny_run.model())
    fit(module, PackedDataModule(tiny_run.dataset(), accumulation_steps=PACKS))
    assert distance(module) < 1e-6


def test_a_validation_inside_a_step_of_ones_own_keeps_its_gradients():
    class Validated(ByHand):
        def validation_step(self, batch, _):
            self.model(**batch)

    module = Validated(tiny_run.model())
    packs = PackedDataModule(tiny_run.dataset(), tiny_run.dataset(), accumulation_steps=PACKS)
    often = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    fit(module, packs, **often)
    assert distance(module) < 1e-6


@pytest.mark.parametrize(
    ("told", "message"),
    [(None, "more than accumulation_steps=1"), (2, "more than accumulation_steps=2"),
     (8, "inside an optimizer step of 8 packs")],
)  # fmt: skip
def test_an_accumulation_that_the_data_does_not_know_of_is_refused(told, message):
    packs = PackedDataModule(tiny_run.dataset(), accumulation_steps=told)
    with pytest.raises(ValueError, match=message):
        fit(ByHand(tiny_run.model()), packs)


@pytest.mark.parametrize("raw", [True, False])
def test_a_step_after_every_pack_is_not_taken_for_an_accumulation(raw):
    class Stepping(ByHand):
        """Clears gradients before the next backward, and skips a step now and then."""

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=not raw)
            if batch_idx != 2:
                optimizer.zero_grad()
                self.manual_backward(self.model(**batch).loss)
                optimizer.step()

    fit(Stepping(tiny_run.model()), limit_train_batches=5)


def test_the_option_for_manual_optimization_is_refused_elsewhere():
    packs = PackedDataModule(tiny_run.dataset(), accumulation_steps=2)
    with pytest.raises(ValueError, match="pass accumulate_grad_batches=2 to the Trainer"):
        fit(Module(tiny_run.model()), packs)


class FromLogits(Module):
    reduction = "sum"

    def training_step(self, batch, _):
        labels, items = batch.pop("labels"), batch["num_items_in_batch"]
        logits = self.model(**batch).logits[0, :-1]
        loss = cross_entropy(logits, labels[0, 1:], reduction=self.reduction)
        return loss / items if self.reduction == "sum" else loss


def test_a_loss_from_logits_is_exact_by_what_the_batch_carries(capsys):
    module = FromLogits(tiny_run.model())
    fit(module, accumulate_grad_batches=PACKS)
    assert distance(module) < 1e-6
    assert capsys.readouterr().out.count("by batch['num_items_in_batch']") == 1


def test_the_mean_of_an_empty_pack_is_told_apart_from_a_divergence():
    module = FromLogits(tiny_run.model())
    module.reduction = "mean"
    # Either may be the cause: a loss of one's own diverges like any other.
    told = r"nan at step 4: lower the learning rate .*; if it is your own loss, divide the sum of"
    with pytest.raises(NonFiniteError, match=told):
        fit(module, accumulate_grad_batches=PACKS)


def test_a_pack_that_is_skipped_is_not_taken_for_a_loss_of_ones_own(capsys):
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else self.model(**batch).loss

    fit(Skipping(tiny_run.model()), limit_train_batches=2)
    assert "num_items_in_batch" not in capsys.readouterr().out


def test_several_loaders_are_refused_before_the_first_batch():
    class Several(PackedDataModule):
        def train_dataloader(self):
            return {"packs": super().train_dataloader(), "others": [1, 2, 3]}

    with pytest.raises(ValueError, match="training reads other loaders than that of Packed"):
        fit(Module(tiny_run.model()), Several(tiny_run.dataset()))


def test_a_finder_of_batch_sizes_is_refused():
    module = Module(tiny_run.model())
    module.batch_size = 2
    with pytest.raises(ValueError, match="BatchSizeFinder changes batch_size, which packs do"):
        fit(module, None, BatchSizeFinder())
