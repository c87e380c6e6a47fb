"""Evaluation by generation in the HF Trainer and in trainers made of it.

    engine = Engine(trainer.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    trainer.add_callback(EvalCallback(trainer, evaluation))

Metrics are logged as `eval_…`, which the loggers show under `eval/…`. With `every=None` they join
the trainer's own evaluations, so that `metric_for_best_model="exact"` and `load_best_model_at_end`
work as ever, and are made after the last step in any case; with `every=N` a new best asks for a
checkpoint, unless saving is off. A metric without a value, because its evaluation failed, was left
out or runs at other steps, is NaN where the trainer looks for its best, and never is.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerCallback

from ..evaluation.generation_eval import GenerationEval, distinct
from ..evaluation.report import Report
from ..evaluation.tables import show


class EvalCallback(TrainerCallback):
    """Run evaluations when they are due, and log what they find."""

    def __init__(self, trainer: Trainer, *evaluations: GenerationEval, console: bool = False):
        """console: print samples, too."""
        self.trainer, self.console = trainer, console
        self.evaluations = distinct(evaluations)
        self._found: dict[str, tuple[int, dict[str, float]]] = {}
        """After which step of this training each of them ran last, and what it found."""
        self._begun_at = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._found.clear()
        self._begun_at = state.global_step
        handler = self.trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback is not self]
        flow = [isinstance(callback, DefaultFlowCallback) for callback in others]
        place = flow.index(True) + 1 if True in flow else 0
        # Whoever looks at metrics, to stop early for one, must come after who brings them.
        handler.callbacks = [*others[:place], self, *others[place:]]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for evaluation in self.evaluations:
            if evaluation.every is not None and evaluation.due(
                state.global_step, state.global_step >= state.max_steps
            ):
                self._run_alone(evaluation, args, state, control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict | None = None, **_: Any
    ) -> None:
        given = {} if metrics is None else metrics  # the trainer looks for its best in this dict
        for evaluation in self.evaluations:
            if evaluation.every is None:
                given.update(self._run(evaluation, state.global_step))
            elif self._ran(evaluation, state.global_step):
                given.update(self._found[evaluation.name][1])
        name = _best_name(args)
        logged = (name or "").replace("eval_", "eval/", 1)
        if name is not None and any(evaluation.may_find(logged) for evaluation in self.evaluations):
            given.setdefault(name, float("nan"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        took_none = state.global_step == self._begun_at  # resumed where it was done
        if state.global_step < state.max_steps or control.should_evaluate or took_none:
            return
        for evaluation in self.evaluations:
            if not self._ran(evaluation, state.global_step):
                self._run_alone(evaluation, args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._found.clear()  # the weights may be others' now: those of the best checkpoint

    def _ran(self, evaluation: GenerationEval, step: int) -> bool:
        return self._found.get(evaluation.name, (-1,))[0] == step

    def _run_alone(self, evaluation: GenerationEval, args: Any, state: Any, control: Any) -> None:
        found = self._run(evaluation, state.global_step)
        if _best_name(args) not in found:
            return
        # In an evaluation of its own the trainer will remember this one; early stops compare first.
        best = self._would_be_best if control.should_evaluate else self._is_best
        if best(found) and args.save_strategy != "no":
            control.should_save = True

    def _would_be_best(self, found: dict[str, float]) -> bool:
        args, before = self.trainer.args, self.trainer.state.best_metric
        new = found[_best_name(args) or ""]
        if before is None:
            return not math.isnan(new)
        return new > before if args.greater_is_better else new < before

    def _is_best(self, found: dict[str, float]) -> bool:
        """Let the trainer compare and remember, as after an evaluation of its own."""
        return self.trainer._determine_best_metric(metrics=found, trial=None)

    def _run(self, evaluation: GenerationEval, step: int) -> dict[str, float]:
        with self.trainer.accelerator.autocast():
            report = evaluation.run(step, self.trainer.model)
        found = {name.replace("eval/", "eval_", 1): v for name, v in report.metrics.items()}
        self._found[evaluation.name] = step, found
        if found:
            self._log(found)
        if self.trainer.is_world_process_zero():
            self._show(report)
        return found

    def _log(self, found: dict[str, float]) -> None:
        asked = self.trainer.control.should_log
        self.trainer.log(found)
        self.trainer.control.should_log = asked  # the loss of this step is still to be logged

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
