"""Two epochs of the HF Trainer, stopped on so many ranks and resumed on so many others.

python epochs_child.py FOLDER RANKS:RANKS_AFTER...

The last line is JSON, for each move: the packs of both parts in the order of the run, and how many
there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hf_child
import tiny_run
import torch
from forking import Ranks, compile_once
from nopad.trainer.with_hf import PackedTrainer
from transformers import TrainerCallback

EPOCHS = 2


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(part: str, rank: int, stop_at: int | None) -> None:
    torch.set_num_threads(1)
    packs, step = [], PackedTrainer.training_step

    def noting(self, *args, **kwargs):
        pack = self._loader.issued[0][0]
        packs.append(pack.index if len(pack.lengths) else None)
        return step(self, *args, **kwargs)

    PackedTrainer.training_step = noting
    run, _ = hf_child.trainer(Path("out"), tiny_run.dataset(), 1, num_train_epochs=EPOCHS)
    if stop_at is not None:
        run.add_callback(StopAt(stop_at))
    run.train(resume_from_checkpoint=stop_at is None)
    Path(f"{part}-{rank}.json").write_text(json.dumps(packs))


def run_part(folder: Path, part: str, world: int, stop_at: int | None) -> list[int]:
    ranks = Ranks(lambda rank: train(part, rank, stop_at), folder, world)
    assert ranks.wait(250) == [0] * world, "".join(ranks.said(rank) for rank in range(world))
    each = [json.loads((folder / f"{part}-{rank}.json").read_text()) for rank in range(world)]
    in_turn = [index for packs in zip(*each, strict=True) for index in packs]
    return [index for index in in_turn if index is not None]


def move(folder: Path, first: int, second: int) -> tuple[list[int], int]:
    count = sum(tiny_run.dataset(epochs=EPOCHS).count(epoch) for epoch in range(EPOCHS))
    before = run_part(folder, "first", first, count // first * 6 // 10)
    return [*before, *run_part(folder, "second", second, None)], count


def main(folder: Path, *moves: str) -> None:
    compile_once()
    print(json.dumps([move(folder / name, *map(int, name.split(":"))) for name in moves]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
