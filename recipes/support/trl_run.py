"""Run a trainer of TRL in a run folder: signals, intact checkpoints, resume, and a plot."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nopad.recipes.support.run_dir import RunDir
from nopad.recipes.support.run_summary import Panel, draw


def fit(trainer: Any, args: argparse.Namespace, run: RunDir) -> None:
    """Train, stop on a signal, and save a model that `from_pretrained` loads."""
    from nopad.trainer import latest_intact_checkpoint, write_manifest
    from nopad.trainer.monitoring import check_weights
    from nopad.trainer.with_hf import StopCallback
    from transformers import TrainerCallback

    class RunCallback(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            run.start(state.is_world_process_zero)

        def on_save(self, args, state, control, **_):
            if state.is_world_process_zero:
                write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    trainer.add_callback(StopCallback())
    trainer.add_callback(RunCallback())
    checkpoint = str(latest_intact_checkpoint(run.path)) if args.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    step = trainer.state.global_step
    check_weights(trainer.model, f"step {step}")
    if finished := step >= trainer.state.max_steps:
        trainer.save_model()
    if trainer.is_world_process_zero():
        run.print_end(f"{run.path}, step {step}", finished)


def plot_metrics(trainer: Any, run: RunDir, names: Sequence[str]) -> None:
    """Write metrics of the log as `training.svg`, and print their first and last values."""
    if not trainer.is_world_process_zero():
        return
    log = [line for line in trainer.state.log_history if names[0] in line]
    panels = []
    for name in names:
        points = [(line["step"], line[name]) for line in log]
        panels.append(Panel(name, points, max(1, math.ceil(max(y for _, y in points))), "g"))
        print(f"{name:24} {points[0][1]:.3g} -> {points[-1][1]:.3g}")
    path = run.path / "training.svg"
    path.write_text(draw(run.path.name, panels), encoding="utf-8")
    print(f"{'plot':24} {path}")
