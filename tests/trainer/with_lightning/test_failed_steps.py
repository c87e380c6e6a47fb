"""A checkpoint that is saved inside of a step holds the steps before it, dropout included."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
import untouched
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

STEPS, ACCUMULATION = 3, 3


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = untouched.model()  # it has dropout
        self.packs = []

    def training_step(self, batch, _):
        self.packs.append(batch["input_ids"].flatten().tolist())
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fail(pl.Callback):
    """Raises in a hook of the second step's batch of this number."""

    def __init__(self, hook: str = "", batch: int = 0):
        self.hook, self.batch = hook, ACCUMULATION + batch

    def _fail(self, hook: str, trainer) -> None:
        if hook == self.hook and trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            raise RuntimeError("interrupted")

    def on_train_batch_start(self, trainer, *_):
        self._fail("start", trainer)

    def on_before_optimizer_step(self, trainer, *_):
        self._fail("optimizer", trainer)

    def on_train_batch_end(self, trainer, *_):
        self._fail("end", trainer)


def test_a_search_for_a_learning_rate_leaves_the_data_where_they_were(tmp_path):
    from lightning.pytorch.tuner import Tuner

    module, data = Module(), PackedDataModule(tiny_run.dataset(epochs=None))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, callbacks=[PackedCallback(data, check=False)],
        logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    Tuner(trainer).lr_find(module, datamodule=data, num_training=3, update_attr=False)
    module.packs.clear()
    trainer.fit(module, data)
    wanted = tiny_run.packs(tiny_run.dataset(epochs=None), 2)
    assert module.packs == [pack.tokens.tolist() for pack in wanted]


def fit(folder, fail: Fail, checkpoint=None, **settings) -> Module:
    torch.manual_seed(0)
    module, data = Module(), PackedDataModule(tiny_run.dataset(epochs=None))
    saves = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=100, save_top_k=-1, save_on_exception=True
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, accumulate_grad_batches=ACCUMULATION, max_steps=STEPS,
        callbacks=[fail, PackedCallback(data, check=False), saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
    return module


@pytest.mark.parametrize(
    ("hook", "batch", "step"),
    [
        ("start", 0, 1),
        ("start", 2, 1),
        ("optimizer", 2, 1),
        ("end", 0, 1),
        pytest.param("end", 2, 2, marks=pytest.mark.smoke("resumed ≡ uninterrupted")),
    ],
)
def test_a_run_that_failed_inside_a_step_continues_to_the_bit(hook, batch, step, tmp_path):
    whole = fit(tmp_path / "whole", Fail())
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, Fail(hook, batch))
    resumed = fit(tmp_path, Fail(), tmp_path / f"step={step}.ckpt")
    assert resumed.packs == whole.packs[step * ACCUMULATION :]
    assert tiny_run.digest(resumed.model) == tiny_run.digest(whole.model)
