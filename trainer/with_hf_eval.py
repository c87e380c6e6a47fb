"""Evaluation by generation in the HF Trainer and in trainers made of it.

    engine = Engine(trainer.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    trainer.add_callback(EvalCallback(trainer, evaluation))

Metrics are logged as `eval_…`, which the loggers show under `eval/…`. With `every=None` they join
the trainer's own evaluations, so that `metric_for_best_model="exact"` and `load_best_model_at_end`
work as ever; with `every=N` a new best asks for a checkpoint, unless saving is off.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from .evaluation import GenerationEval, distinct
from .evaluation_report import Report
from .evaluation_table import show


class EvalCallback(TrainerCallback):
    """Run evaluations when they are due, and log what they find."""

    def __init__(self, trainer: Trainer, *evaluations: GenerationEval, console: bool = False):
        """console: print samples, too."""
        self.trainer, self.console = trainer, console
        self.evaluations = distinct(evaluations)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for evaluation in self.evaluations:
            if evaluation.every is not None and evaluation.due(
                state.global_step, state.global_step >= state.max_steps
            ):
                found = self._run(evaluation, state.global_step)
                if _best_name(args) in found and self._is_best(found):
                    control.should_save = args.save_strategy != "no"

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict | None = None, **_: Any
    ) -> None:
        for evaluation in self.evaluations:
            if evaluation.every is None:
                found = self._run(evaluation, state.global_step)
                if metrics is not None:  # the trainer looks for its best metric in this very dict
                    metrics.update(found)
        name = _best_name(args)
        if (
            metrics is not None
            and name is not None
            and any(e.every is None for e in self.evaluations)
        ):
            metrics.setdefault(name, float("nan"))  # a failed evaluation is never the best

    def _is_best(self, found: dict[str, float]) -> bool:
        """Let the trainer compare and remember, as after an evaluation of its own."""
        return self.trainer._determine_best_metric(metrics=found, trial=None)

    def _run(self, evaluation: GenerationEval, step: int) -> dict[str, float]:
        with self.trainer.accelerator.autocast():
            report = evaluation.run(step, self.trainer.model)
        found = {name.replace("eval/", "eval_", 1): v for name, v in report.metrics.items()}
        if found:
            self.trainer.log(found)
        if self.trainer.is_world_process_zero():
            self._show(report)
        return found

    def _show(self, report: Report) -> None:
        loggers = []
        for callback in self.trainer.callback_handler.callbacks:
            loggers.append(getattr(callback, "tb_writer", None))
            wandb = getattr(callback, "_wandb", None)
            if wandb is not None and wandb.run is not None:
                loggers.append(_Tables(wandb))
        show(report, loggers, self.console)


class _Tables:
    """W&B as the Trainer's callback holds it."""

    def __init__(self, wandb: Any):
        self._wandb = wandb

    def log_table(self, name: str, columns: list, data: list, step: int) -> None:
        table = self._wandb.Table(columns=columns, data=data)
        self._wandb.log({name: table, "train/global_step": step})


def _best_name(args: Any) -> str | None:
    name = args.metric_for_best_model
    return name if name is None or name.startswith("eval_") else f"eval_{name}"
