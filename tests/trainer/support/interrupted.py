"""Ctrl-C from outside while an evaluation generates, in a real process of each trainer.

    fork ─▶ until the child says that it generates ─▶ SIGINT to its group, as a terminal does
         ─▶ its exit code, what it noted before and after the evaluation, and who is left

    python interrupted.py FOLDER TRAINER...

A trainer's name with `:forgets` runs an engine that does not put the training flags back.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import untouched
from forking import Ranks, compile_once, fresh
from nopad.inference.execution.model_runner import ModelRunner
from nopad.inference.live_model import borrow
from nopad.trainer.evaluation import GenerationEval


def train(trainer: str, forgets: bool) -> None:
    """Train with slow evaluations, and write down how that ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    diary, before = untouched.Diary("sampled", "ends", every=2), []
    run, launch = GenerationEval.run, ModelRunner.launch

    def noted(self, step, *args):
        before.append(diary.look())
        return run(self, step, *args)

    def slow(self, step):
        Path("generating").touch()
        time.sleep(0.3)
        return launch(self, step)

    GenerationEval.run, ModelRunner.launch = noted, slow
    if forgets:
        borrow._eval_mode = forgetting
    ended = "finished"
    try:
        untouched.TRAINERS[trainer](diary, 6, Path("out"))
    except (KeyboardInterrupt, SystemExit):
        ended = "interrupted"
    after = diary.notes[0]
    changed = [key for key in after if after[key] != before[0][key]]
    Path("found.json").write_text(json.dumps({"ended": ended, "changed": changed}))


def forgetting(modules):
    for module in modules:
        module.training = False
    return nullcontext()


def interrupt(folder: Path, name: str) -> dict:
    trainer, _, how = name.partition(":")
    run_dir = fresh(folder / name.replace(":", "-"))
    child = Ranks(lambda rank: train(trainer, how == "forgets"), run_dir)
    child.wait_for((run_dir / "generating").exists)
    os.killpg(child.pids[0], signal.SIGINT)
    (code,) = child.wait(250)
    path = run_dir / "found.json"
    result = json.loads(path.read_text()) if path.exists() else {"said": child.said()[-3000:]}
    return {**result, "code": code, "left": left_over(child.pids[0])}


def left_over(group: int, seconds: float = 60) -> bool:
    """Whether a process of the group is still running after these seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    compile_once()
    print(json.dumps({name: interrupt(Path(sys.argv[1]), name) for name in sys.argv[2:]}))
