"""One rank of the Lightning tests; prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import tiny_run
import torch
import untouched
from nopad.runtime import destroy_group
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self, model=None):
        super().__init__()
        self.model = model or tiny_run.model()
        self.gradient, self.losses = None, []

    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.model(**batch).loss, sync_dist=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer):
        if self.gradient is None:
            self.gradient = {n: p.grad.clone() for n, p in self.model.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(accumulation: int, data=None, workers: int = 0, checkpoint=None, validation=None, **limits):
    module = Module(limits.pop("model", None))
    packs = PackedDataModule(data or tiny_run.dataset(), validation, num_workers=workers)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD,
        accumulate_grad_batches=accumulation,
        callbacks=[PackedCallback(packs)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    trainer.fit(module, packs, ckpt_path=checkpoint)
    return trainer, module


def gradients() -> dict:
    found = {}
    for accumulation in (1, 4):
        whole = tiny_run.dataset(rank=0, world_size=1)
        gold = tiny_run.gold_gradient(tiny_run.model(), tiny_run.packs(whole, accumulation * WORLD))
        for workers in (0, 2):
            _, module = fit(accumulation, workers=workers, max_steps=1)
            found[f"{accumulation} {workers}"] = tiny_run.distance(module.gradient, gold)
    return found


def dropping():
    """A model with dropout, of which each rank draws its own."""
    made = untouched.model()
    torch.manual_seed(int(os.environ["RANK"]))
    return made


def resumed(folder: Path) -> dict:
    _, whole = fit(2, tiny_run.dataset(epochs=None), model=dropping(), max_steps=6)
    trainer, first = fit(2, tiny_run.dataset(epochs=None), model=dropping(), max_steps=3)
    trainer.save_checkpoint(folder / "middle.ckpt")
    again = {"workers": 1, "checkpoint": folder / "middle.ckpt", "max_steps": 6}
    _, second = fit(2, tiny_run.dataset(epochs=None), model=dropping(), **again)
    return {
        "whole": [whole.losses, tiny_run.digest(whole)],
        "parts": [first.losses + second.losses, tiny_run.digest(second)],
    }


def curve() -> list[float]:
    trainer, module = fit(8 // WORLD, tiny_run.dataset(epochs=None), max_steps=4)
    means = torch.tensor(module.losses).view(4, -1).mean(1)
    return trainer.strategy.reduce(means, reduce_op="mean").tolist()


def validated() -> list[float]:
    trainer, module = fit(1, max_steps=1, validation=tiny_run.dataset(23), limit_train_batches=1)
    total, count = 0.0, 0
    for pack in tiny_run.dataset(23, rank=0, world_size=1):
        with torch.no_grad():
            total += float(module.model(**tiny_run.collate(pack), num_items_in_batch=1).loss)
        count += pack.num_label_tokens
    return [float(trainer.callback_metrics["val"]), total / count]


def main(folder: Path) -> None:
    ended, _ = fit(2, tiny_run.dataset(count=9), max_epochs=2)
    print(
        json.dumps(
            {
                "gradients": gradients(),
                "resumed": resumed(folder),
                "curve": curve(),
                "ends": ended.global_step,
                "validated": validated(),
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    WORLD = int(sys.argv[2])
    main(Path(sys.argv[1]))
    destroy_group()
