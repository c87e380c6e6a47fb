"""A resumed run whose optimizer steps have other packs than the saved one says so, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from front_ends import Module
from nopad.trainer.data import DataState, PackedLoader, load_data_state, save_data_state
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from transformers import TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")


def accelerate(folder: Path, packs: int, step: int) -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=packs)
    model = tiny_run.model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = PackedAccelerateLoader(accelerator, tiny_run.dataset(), check=False)
    if step > 1:
        accelerator.load_state(str(folder))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        if accelerator.sync_gradients:
            break
    accelerator.save_state(str(folder))


def hf(folder: Path, packs: int, step: int) -> None:
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(
        str(folder), max_steps=step, gradient_accumulation_steps=packs, save_steps=1, **quiet
    )
    trainer = PackedTrainer(tiny_run.model(), args, None, tiny_run.dataset(), check=False)
    trainer.train(resume_from_checkpoint=step > 1 or None)


def lightning(folder: Path, packs: int, step: int) -> None:
    data = PackedDataModule(tiny_run.dataset())
    quiet: dict[str, Any] = {f"enable_{name}": False for name in ("progress_bar", "model_summary")}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **quiet,
        max_steps=step, accumulate_grad_batches=packs,
        callbacks=[PackedCallback(data, check=False)],
    )  # fmt: skip
    path = str(folder / "last.ckpt")
    trainer.fit(Module(tiny_run.model()), data, ckpt_path=path if step > 1 else None)
    trainer.save_checkpoint(path)


def distributed_checkpoint(folder: Path, packs: int, step: int) -> None:
    loader, path = PackedLoader(tiny_run.dataset(), accumulation_steps=packs), folder / "state"
    if step > 1:
        DataState(loader).load_state_dict(json.loads(path.read_text()))
    for _ in zip(loader, range(packs), strict=False):
        pass
    path.write_text(json.dumps(DataState(loader).state_dict()))


@pytest.mark.parametrize("run", [accelerate, hf, lightning, distributed_checkpoint])
def test_another_number_of_packs_per_step_is_said_once_with_how_to_keep_it(run, tmp_path, capsys):
    run(tmp_path, 2, step=1)
    run(tmp_path, 2, step=2)
    assert "an optimizer step has" not in capsys.readouterr().out
    run(tmp_path, 1, step=3)
    said = capsys.readouterr().out
    assert said.count("an optimizer step now has 1 packs; in the saved run it had 2") == 1
    assert "To keep 2, accumulate 2 packs per rank" in said


def test_the_packs_of_a_step_are_counted_over_all_ranks(tmp_path, capsys):
    """As if two ranks had saved, and three resumed."""
    saved = []
    for rank in range(2):
        loader = PackedLoader(tiny_run.dataset(rank=rank, world_size=2), accumulation_steps=2)
        next(iter(loader))
        save_data_state(loader, tmp_path / str(rank))
        saved.append((tmp_path / str(rank) / "nopad_data.json").read_bytes())
    assert saved[0] == saved[1]
    loader = PackedLoader(tiny_run.dataset(rank=0, world_size=3), accumulation_steps=2)
    load_data_state(loader, tmp_path / "0")
    next(iter(loader))
    assert "start a number of ranks that divides 4" in capsys.readouterr().out
