"""Trials of several ranks in every front end: uneven ends, and a change of ranks and workers.

    python tests/trainer/support/rank_trials.py uneven 200 --folder /tmp/trials
    python tests/trainer/support/rank_trials.py moved 12 --folder /tmp/trials

A trial's random choices come from its number. The last line is JSON: how many, how they went.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning.pytorch as pl
import numpy as np
import tiny_run
import torch
from accelerate import Accelerator
from forking import Ranks, compile_once, fresh
from front_ends import Module
from nopad.packing import PackedDataset
from nopad.trainer.loss import attach_loss
from nopad.trainer.with_accelerate import PackedAccelerateLoader
from nopad.trainer.with_hf import PackedTrainer
from nopad.trainer.with_lightning import PackedCallback, PackedDataModule
from transformers import LlamaForCausalLM, TrainingArguments  # noqa: F401

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
Seen = dict[str, list]


def accelerate(data, accumulation: int, steps: int, workers=0, load=None, save=None) -> Seen:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = tiny_run.model()
    attach_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = PackedAccelerateLoader(accelerator, data, num_workers=workers)
    model, optimizer = accelerator.prepare(model, optimizer)
    if load:
        accelerator.load_state(load)
    seen: Seen = {"packs": [], "losses": []}
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen["packs"].append(loader.last_pack.index)
        seen["losses"].append(float(loss.detach()))
        if len(seen["packs"]) == steps * accumulation:
            break
    if save:
        accelerator.save_state(save)
    return seen


def hf(data, accumulation: int, steps: int) -> Seen:
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments("hf", gradient_accumulation_steps=accumulation, **settings)
    args.num_train_epochs = 1
    trainer = PackedTrainer(tiny_run.model(), args, None, data)
    trainer.train()
    return {"packs": [0] * trainer.state.global_step * accumulation, "losses": []}


class Watching(PackedCallback):
    """Notes the packs that were stepped, and their losses; saves with the last step."""

    def __init__(self, data: PackedDataModule, save: str | None):
        super().__init__(data)
        self.packs, self.losses, self.save = [], [], save

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.packs.append(self.data.loader.issued[0][0].index)
        self.losses.append(float(outputs["loss"].detach()) * trainer.accumulate_grad_batches)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.save and trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.save)


def lightning(data, accumulation: int, steps: int, workers=0, load=None, save=None) -> Seen:
    packs = PackedDataModule(data, num_workers=workers)
    watch, module = Watching(packs, save), Module(tiny_run.model())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_steps=steps,
        max_epochs=1 if steps < 0 else None,
        accumulate_grad_batches=accumulation,
        callbacks=[watch],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(module, packs, ckpt_path=load, weights_only=True)
    return {"packs": watch.packs, "losses": watch.losses}


FRONTS = {"accelerate": accelerate, "hf": hf, "lightning": lightning}


def launch(at: Path, world: int, front: str, *args, seconds: float = 60, **kwargs) -> list[Seen]:
    """Run a front end on so many ranks; what each of them saw."""

    def target(rank: int) -> None:
        torch.set_num_threads(1)
        make, *rest = args
        seen = FRONTS[front](make(), *rest, **kwargs)
        Path(f"seen-{rank}").write_text(json.dumps(seen))

    run = Ranks(target, at, world)
    assert run.wait(seconds) == [0] * world, "".join(
        run.said(rank)[-3000:] for rank in range(world)
    )
    return [json.loads((at / f"seen-{rank}").read_text()) for rank in range(world)]


def uneven(number: int, folder: Path) -> str:
    """However few or uneven the packs are, all ranks stop after the same step."""
    draw = random.Random(number)
    front, world = draw.choice(list(FRONTS)), draw.choice([2, 4])
    count, accumulation = draw.choice([1, 2, 3, 5, 9, 17, 40]), draw.choice([1, 2, 3])
    sharded, packs = front != "hf" and draw.random() < 0.5, draw.randint(1, 20)

    def make() -> PackedDataset:
        if not sharded:
            return tiny_run.dataset(count)
        rows, parts = (
            tiny_run.samples(count),
            {"shards": 8, "max_packs": packs, "pretokenize": False},
        )
        return PackedDataset(lambda: iter(rows), budget=tiny_run.BUDGET, **parts)

    seen = launch(fresh(folder / f"uneven-{number}"), world, front, make, accumulation, -1)
    took = [len(each["packs"]) for each in seen]
    assert len(set(took)) == 1 and took[0] % accumulation == 0 < took[0], took
    return f"{front} {'sharded' if sharded else 'planned'} {world} ranks"


MOVES = [((1, 0), (2, 1)), ((2, 1), (1, 0)), ((2, 0), (4, 1)), ((4, 1), (2, 2)), ((1, 2), (4, 0)),
         ((4, 0), (1, 1))]  # fmt: skip
"""From so many (ranks, workers) to so many, with 4 packs a step in all."""


def moved(number: int, folder: Path) -> str:
    """Three steps, a checkpoint, three more with other ranks and workers: the packs of one run."""
    front = ("accelerate", "lightning")[number // len(MOVES) % 2]
    before, after = MOVES[number % len(MOVES)]
    at = fresh(folder / f"moved-{number}")
    kept = str(at / ("state" if front == "accelerate" else "middle.ckpt"))

    def make() -> PackedDataset:
        return tiny_run.dataset(epochs=None)

    parts = []
    for (world, workers), more in ((before, {"save": kept}), (after, {"load": kept})):
        steps = 3 if front == "accelerate" or "save" in more else 6
        each = launch(at / f"part-{len(parts)}", world, front, make, 4 // world, steps,
                      workers=workers, **more)  # fmt: skip
        parts.append(in_turn(each))
    whole = in_turn(launch(at / "whole", 1, front, make, 4, 6))
    packs = [*parts[0]["packs"], *parts[1]["packs"]]
    assert packs == whole["packs"] == list(range(24)), packs
    losses = [step_losses(part) for part in parts]
    assert np.allclose(np.concatenate(losses), step_losses(whole), rtol=1e-4), losses
    return f"{front} {before} -> {after}"


def in_turn(ranks: list[Seen]) -> Seen:
    """The packs of all ranks in the order of the run."""
    return {
        name: [
            value
            for values in zip(*(seen[name] for seen in ranks), strict=True)
            for value in values
        ]
        for name in ("packs", "losses")
    }


def step_losses(seen: Seen) -> np.ndarray:
    return np.array(seen["losses"]).reshape(-1, 4).mean(1)


TRIALS = {"uneven": uneven, "moved": moved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=TRIALS)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    compile_once()
    outcomes, failures = {}, []
    for number in range(args.first, args.first + args.count):
        try:
            told = TRIALS[args.what](number, args.folder)
            outcomes[told] = outcomes.get(told, 0) + 1
        except AssertionError as error:
            told = f"FAILED {str(error)[-9000:]}"
            failures.append([number, told])
        print(number, told, flush=True)
    print(json.dumps({"trials": args.count, "outcomes": outcomes, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
