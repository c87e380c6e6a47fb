"""`EvalCallback` and `ServeCallback` of the HF Trainer, and the loader of validation packs.

    engine = Engine(trainer.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    trainer.add_callback(EvalCallback(trainer, evaluation))

Metrics are logged as `eval_…`, which the loggers show under `eval/…`. With `every=None`, an
evaluation runs as part of the trainer's own and after the last step, so that
`metric_for_best_model="exact"` and `load_best_model_at_end` work as usual. With `every=N`, a new
best value requests a checkpoint, unless saving is off. If a metric has no value, because its
evaluation failed, was skipped or runs at other steps, the trainer sees NaN, never the best value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

from ..data.loader import Batch, EvaluationLoader
from ..evaluation.eval_report import Report
from ..evaluation.generation_eval import GenerationEval, check_unique_names
from ..evaluation.live_requests import LiveServer, answer_requests, check_server
from ..evaluation.report_writer import ReportWriter


class EvalCallback(TrainerCallback):
    """Run evaluations when they are due, and log their metrics and completions."""

    def __init__(self, trainer: Trainer, *evaluations: GenerationEval, console: bool = False):
        """Take the evaluations to run.

        Args:
            trainer: the trainer that this callback is added to.
            evaluations: one or several; several need different names.
            console: also print completions, and metrics if the trainer does not.
        """
        self.trainer = trainer
        self.evaluations = check_unique_names(evaluations)
        self._writer = ReportWriter(console)
        self._latest: dict[str, tuple[int, dict[str, float]]] = {}
        """The step and the metrics of each evaluation's latest run, by its name."""
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._latest.clear()
        self._first_step = state.global_step
        for evaluation in self.evaluations:
            evaluation.budget.restart()
        handler = self.trainer.callback_handler
        others = [callback for callback in handler.callbacks if callback is not self]
        is_flow = [isinstance(callback, DefaultFlowCallback) for callback in others]
        index = is_flow.index(True) + 1 if True in is_flow else 0
        # Callbacks that read metrics, such as early stopping, must come after this one.
        handler.callbacks = [*others[:index], self, *others[index:]]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for evaluation in self.evaluations:
            if evaluation.every is not None and evaluation.due(
                state.global_step, state.global_step >= state.max_steps
            ):
                self._run_alone(evaluation, args, state, control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict | None = None, **_: Any
    ) -> None:
        metrics = {} if metrics is None else metrics  # the trainer looks for its best in this dict
        for evaluation in self.evaluations:
            if evaluation.every is None:
                metrics.update(self._run(evaluation, state.global_step))
            elif self._has_run(evaluation, state.global_step):
                metrics.update(self._latest[evaluation.name][1])
        name = _best_metric_name(args)
        logged = (name or "").replace("eval_", "eval/", 1)
        if name is not None and any(evaluation.reports(logged) for evaluation in self.evaluations):
            metrics.setdefault(name, float("nan"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        no_steps = state.global_step == self._first_step  # resumed after the last step
        if state.global_step < state.max_steps or control.should_evaluate or no_steps:
            return
        for evaluation in self.evaluations:
            if not self._has_run(evaluation, state.global_step):
                self._run_alone(evaluation, args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._latest.clear()  # the trainer may have loaded the weights of the best checkpoint

    def _has_run(self, evaluation: GenerationEval, step: int) -> bool:
        return self._latest.get(evaluation.name, (-1,))[0] == step

    def _run_alone(self, evaluation: GenerationEval, args: Any, state: Any, control: Any) -> None:
        """Evaluate outside the trainer's own evaluation; request a checkpoint for a new best."""
        metrics = self._run(evaluation, state.global_step)
        if _best_metric_name(args) not in metrics:
            return
        # If the trainer evaluates at this step too, it records the best itself, after early
        # stopping has compared.
        is_best = self._would_be_best if control.should_evaluate else self._is_best
        if is_best(metrics) and args.save_strategy != "no":
            control.should_save = True

    def _would_be_best(self, metrics: dict[str, float]) -> bool:
        args, before = self.trainer.args, self.trainer.state.best_metric
        value = metrics[_best_metric_name(args) or ""]
        if before is None:
            return not math.isnan(value)
        return value > before if args.greater_is_better else value < before

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Let the trainer compare and record, as after its own evaluation."""
        return self.trainer._determine_best_metric(metrics=metrics, trial=None)

    def _run(self, evaluation: GenerationEval, step: int) -> dict[str, float]:
        with self.trainer.accelerator.autocast():
            report = evaluation.run(step, self.trainer.model, _meter(self.trainer))
        metrics = {name.replace("eval/", "eval_", 1): v for name, v in report.metrics.items()}
        self._latest[evaluation.name] = step, metrics
        if metrics:
            self._log(metrics)
        if self.trainer.is_world_process_zero():
            self._show(report)
        return metrics

    def _log(self, metrics: dict[str, float]) -> None:
        should_log = self.trainer.control.should_log
        with metrics_kept(self.trainer, "train"):
            self.trainer.log(metrics)
        self.trainer.control.should_log = should_log  # the loss of this step is still to be logged

    def _show(self, report: Report) -> None:
        loggers = []
        for callback in self.trainer.callback_handler.callbacks:
            loggers.append(getattr(callback, "tb_writer", None))
            wandb = getattr(callback, "_wandb", None)
            if wandb is not None and wandb.run is not None:
                loggers.append(_WandbTables(wandb))
        self._writer.write(report, loggers, metrics=not self._prints_logs())

    def _prints_logs(self) -> bool:
        """Return whether what is logged now appears on the terminal."""
        return any(
            isinstance(callback, PrinterCallback)
            or (isinstance(callback, ProgressCallback) and callback.training_bar is not None)
            for callback in self.trainer.callback_handler.callbacks
        )


class ServeCallback(TrainerCallback):
    """Answer the requests of a live endpoint between optimizer steps; close it after the last.

    With `load_best_model_at_end`, requests that still wait then are refused: the weights are those
    of another step.
    """

    def __init__(self, trainer: Trainer, server: LiveServer):
        """Take the server.

        Args:
            trainer: the trainer that this callback is added to.
            server: what `serve(engine, when=…)` returned, on this rank.
        """
        self.trainer = trainer
        self.server = check_server(server)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.server.training_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.server.training_step = state.global_step
        if self.server.when == "step":
            self._answer(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.server.when == "evaluation":
            self._answer(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not args.load_best_model_at_end:
            self._answer(state.global_step, last=True)
        self.server.close()

    def _answer(self, step: int, last: bool = False) -> None:
        with self.trainer.accelerator.autocast():
            answer_requests(self.server, step, self.trainer.model, _meter(self.trainer), last)


class _WandbTables:
    """W&B as the Trainer's callback holds it, with a `log_table`."""

    def __init__(self, wandb: Any):
        self._wandb = wandb

    def log_table(self, name: str, columns: list, data: list, step: int) -> None:
        table = self._wandb.Table(columns=columns, data=data)
        self._wandb.log({name: table, "train/global_step": step})


def _meter(trainer: Trainer) -> Any:
    """Return the throughput meter; a stock Trainer has none."""
    return getattr(trainer, "meter", None)


def _best_metric_name(args: Any) -> str | None:
    name = args.metric_for_best_model
    return name if name is None or name.startswith("eval_") else f"eval_{name}"


@contextmanager
def metrics_kept(trainer: Trainer, mode: str) -> Iterator[None]:
    """Keep TRL's metrics of "train" or "eval" for their own log line; nothing in other trainers.

    TRL adds the metrics of a mode to the next line logged while the model is in that mode.
    """
    metrics = trl_log(trainer)
    if metrics is None:
        yield
        return
    kept, metrics[mode] = metrics[mode], defaultdict(list)
    try:
        yield
    finally:
        metrics[mode] = kept


def trl_log(trainer: Trainer) -> dict[str, dict[str, list[float]]] | None:
    """Return the values of "train" and "eval" that TRL logs next; None in other trainers."""
    metrics = getattr(trainer, "_metrics", None)
    return metrics if isinstance(metrics, dict) and "train" in metrics else None


class TrainerEvaluationLoader(EvaluationLoader):
    """The packs of an evaluation set of any kind.

    For a set of token ids, the stock loader would yield batches without labels, hence without a
    loss; other sets it would pad. Like the accelerator's own loaders, this one informs the
    accelerator of the last batch, at which the trainer computes metrics (`batch_eval_metrics`).
    """

    gradient_state: Any = None
    """The accelerator's state, which knows the loaders that are being read."""
    end_of_dataloader = False
    remainder = -1
    """Accelerate drops no rows at the end."""

    def __iter__(self) -> Iterator[Batch]:
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for number, batch in enumerate(super().__iter__(), start=1):
                self.end_of_dataloader = number == self.packs
                yield batch
        finally:
            self.gradient_state._remove_dataloader(self)
