"""Plain data sets in Lightning and Accelerate: packed as a user would pack them."""

from __future__ import annotations

import datasets
import lightning.pytorch as pl
import pytest
import tiny_run
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from char_words import char_tokenizer
from front_ends import Noting
from nopad.packing import PackedDataset
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = datasets.Dataset.from_list([{"text": "abcde"[: n % 4 + 1] * (n % 7 + 1)} for n in range(9)])


class Validated(Noting):
    def validation_step(self, batch, _):
        self.log("val", self.model(**batch).loss, batch_size=1)


def fit(packs: PackedDataModule) -> tuple[Validated, pl.Trainer]:
    module = Validated()
    quiet = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, **quiet,
        num_sanity_val_steps=0, callbacks=[PackedCallback(packs, check=False)],
    )  # fmt: skip
    trainer.fit(module, packs)
    return module, trainer


def packs_of(data: PackedDataset) -> list[list[int]]:
    return [pack.tokens.tolist() for pack in data]


def test_lightning_packs_plain_data_when_it_knows_the_model(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    tokenizer = char_tokenizer()
    module, trainer = fit(PackedDataModule(TEXTS, TEXTS, budget=32, tokenizer=tokenizer))
    assert module.batches == packs_of(PackedDataset(TEXTS, tokenizer=tokenizer, budget=32, seed=5))
    assert float(trainer.callback_metrics["val"]) > 0
    long = PackedDataModule([[5] * 100, [6] * 3], budget=256, seed=1)
    fit(long)
    assert long.train_dataset.settings["max_length"] == 64


@pytest.mark.parametrize("prepared", [False, True])
def test_accelerate_s_loader_packs_plain_data(prepared):
    AcceleratorState._reset_state()
    accelerator, rows = Accelerator(cpu=True), [[5] * 140, [6] * 3, [7] * 9]
    if prepared:
        accelerator.prepare(tiny_run.model())
    loader = PackedAccelerateLoader(accelerator, rows, budget=256, seed=2, check=False)
    limit = 64 if prepared else None
    wanted = PackedDataset(rows, budget=256, seed=2, max_length=limit)
    assert [batch["input_ids"][0].tolist() for batch in loader] == packs_of(wanted)
    assert loader.dataset.settings == wanted.settings


@pytest.mark.parametrize(
    ("data", "settings", "told"),
    [
        (TEXTS, {}, "is a Dataset: pass budget="),
        (None, {"budget": 8}, "is missing: pass a data set"),
        (tiny_run.dataset(), {"budget": 8}, "budget=8 does not apply to a PackedDataset"),
        (tiny_run.dataset(), {"seed": 8}, "seed= is for plain data: pass it to the PackedDataset"),
        (tiny_run.dataset(), {"tokenizer": len}, "tokenizer= is for plain data"),
    ],
)
def test_settings_are_asked_for_and_refused_where_they_have_no_effect(data, settings, told):
    for make in (PackedDataModule, lambda *a, **k: PackedAccelerateLoader(Accelerator(), *a, **k)):
        with pytest.raises(ValueError, match=told):
            make(data, **settings)
