"""A checkpoint of the end of a pass: the resumed run goes on with the next one, in order.

Lightning's epochs have a file of their own.
"""

from __future__ import annotations

import json

import pytest
import tiny_run
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from nopad.packing import PackedDataset
from nopad.trainer.data import PackedLoader
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from transformers import TrainingArguments

KINDS = {"finite": {}, "two epochs": {"epochs": 2}, "packs": {"epochs": None, "max_packs": 7}}


def dataset(kind: str) -> PackedDataset:
    if kind == "stream":
        rows = [row["input_ids"] for row in tiny_run.samples(14)]
        settings = {"shards": 2, "pretokenize": False, "shuffle": 4, "pool": 2}
        return PackedDataset(lambda: iter(rows), budget=tiny_run.BUDGET, **settings)
    return tiny_run.dataset(14, **KINDS[kind])


def ids(batch: dict) -> list[int]:
    return batch["input_ids"].flatten().tolist()


@pytest.mark.parametrize("kind", [*KINDS, "stream"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulation_steps": 3},
        {"accumulation_steps": 4, "drop_last": True},
        {"accumulation_steps": 3, "num_workers": 1},
    ],
    ids=str,
)
def test_the_state_behind_the_last_step_goes_on_with_the_next_pass(kind, settings):
    loader, passes, states = PackedLoader(dataset(kind), **settings), [], []
    for _ in range(3):
        passes.append([])
        for batch in loader:
            passes[-1].append(ids(batch))
            inside = json.dumps(loader.state())
        states.append(json.dumps(loader.state()))
        assert inside == states[-1], "the end of the loop moved the state"
    assert passes[0] and passes[0] != passes[1] != passes[2]
    again = PackedLoader(dataset(kind), **settings)
    again.load_state(json.loads(states[0]))
    assert [[ids(batch) for batch in again] for _ in range(2)] == passes[1:]


def test_an_iteration_left_at_its_last_batch_is_followed_by_the_next_pass():
    whole = PackedLoader(dataset("finite"))
    first, second = ([ids(batch) for batch in whole] for _ in range(2))
    loader = PackedLoader(dataset("finite"))
    assert [ids(batch) for _, batch in zip(first, loader, strict=False)] == first
    assert [ids(batch) for batch in loader] == second


@pytest.mark.parametrize("kind", ["finite", "stream"])
@pytest.mark.parametrize("inside", [True, False], ids=["at the last step", "after the loop"])
def test_accelerate_goes_on_with_the_next_pass(kind, inside, tmp_path):
    def begin() -> tuple[Accelerator, PackedAccelerateLoader]:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        return accelerator, PackedAccelerateLoader(accelerator, dataset(kind), check=False)

    accelerator, loader = begin()
    for _ in loader:
        if inside and loader.end_of_dataloader:
            accelerator.save_state(str(tmp_path))
    if not inside:
        accelerator.save_state(str(tmp_path))
    uninterrupted = [[ids(batch) for batch in loader] for _ in range(2)]
    accelerator, loader = begin()
    accelerator.load_state(str(tmp_path))
    assert [[ids(batch) for batch in loader] for _ in range(2)] == uninterrupted
    assert uninterrupted[0] and uninterrupted[0] != uninterrupted[1]


class Noting(PackedTrainer):
    """Notes the tokens of every batch that it trained on."""

    def training_step(self, model, inputs, *more):
        self.__dict__.setdefault("batches", []).append(ids(inputs))
        return super().training_step(model, inputs, *more)


def hf(folder, data, checkpoint=None, **settings) -> tuple[list, int]:
    args = TrainingArguments(
        str(folder),
        gradient_accumulation_steps=2,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = Noting(tiny_run.model(), args, None, data, check=False)
    trainer.batches = []
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / f"checkpoint-{checkpoint}"))
    return trainer.batches, trainer.state.global_step


def test_the_hf_trainer_goes_on_with_the_next_pass(tmp_path):
    """The passes of a stream end the training: see `with_hf/test_epochs.py`."""
    steps = -(-len(list(dataset("finite"))) // 2)  # of a pass
    whole, _ = hf(tmp_path, dataset("finite"), max_steps=steps + 2)
    resumed, reached = hf(tmp_path, dataset("finite"), steps, max_steps=steps + 2)
    assert resumed == whole[-4:] and reached == steps + 2
    assert hf(tmp_path, dataset("finite"), steps + 2, max_steps=steps + 2) == ([], steps + 2)


def test_the_hf_trainer_trains_epochs_that_were_added(tmp_path):
    first, one = hf(tmp_path, tiny_run.dataset(15), num_train_epochs=1)
    assert hf(tmp_path, tiny_run.dataset(15), one, num_train_epochs=1) == ([], one)
    rest, both = hf(tmp_path, tiny_run.dataset(15), one, num_train_epochs=2)
    whole, steps = hf(tmp_path / "whole", tiny_run.dataset(15), num_train_epochs=2)
    assert (first + rest, both) == (whole, steps) and len(first) % 2 == 0
