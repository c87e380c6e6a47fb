"""Evaluation by generation, and requests of a live endpoint, in Lightning.

    engine = Engine(module.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    best = ModelCheckpoint(monitor="eval/exact", mode="max", every_n_train_steps=500)
    Trainer(callbacks=[EvalCallback(evaluation), best], ...)

With `every=None` it runs at the end of each validation instead, and after the last step.

A metric without a value, because its evaluation failed or was skipped, is NaN: `ModelCheckpoint`
treats it as the worst value. `EarlyStopping` would stop: pass it `check_finite=False`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ..evaluation.eval_report import Report
from ..evaluation.generation_eval import (
    GenerationEval,
    check_unique_names,
    eval_states,
    load_eval_states,
)
from ..evaluation.live_requests import LiveServer, answer_requests, check_server
from ..evaluation.report_writer import ReportWriter, table_logger
from ..monitoring.throughput import ThroughputMeter
from .hooks import AfterStep, pl
from .packed_callback import PackedCallback

log = logging.getLogger(__name__)


class EvalCallback(AfterStep):
    """Run evaluations when they are due, and log their metrics and completions."""

    def __init__(self, *evaluations: GenerationEval, console: bool = False):
        """Take the evaluations to run.

        Args:
            evaluations: one or several; several need different names.
            console: also print metrics and completions.
        """
        self.evaluations = check_unique_names(evaluations)
        self._writer = ReportWriter(console)
        self._last_run: dict[str, int] = {}
        """The step of each evaluation's latest run, by its name."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_run.clear()
        for evaluation in self.evaluations:
            evaluation.budget.restart()
        for stopping in trainer.early_stopping_callbacks:
            name = stopping.monitor
            is_ours = any(evaluation.reports(name) for evaluation in self.evaluations)
            if is_ours and stopping.check_finite and trainer.is_global_zero:
                log.warning(
                    "EarlyStopping(%r) stops when an evaluation has no value because it failed or "
                    "was skipped: pass check_finite=False to continue training",
                    name,
                )

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        for evaluation in self.evaluations:
            if evaluation.every is not None and evaluation.due(step, step == trainer.max_steps):
                self._run(evaluation, trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        for evaluation in self.evaluations:
            if evaluation.every is None:
                self._run(evaluation, trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _is_run_end(trainer):
            return
        for evaluation in self.evaluations:
            if self._last_run.get(evaluation.name) != trainer.global_step:
                self._run(evaluation, trainer, pl_module)

    def state_dict(self) -> dict:
        return eval_states(self.evaluations)

    def load_state_dict(self, state_dict: dict) -> None:
        load_eval_states(self.evaluations, state_dict)

    def _run(
        self, evaluation: GenerationEval, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        self._last_run[evaluation.name] = trainer.global_step
        with trainer.precision_plugin.forward_context():
            report = evaluation.run(trainer.global_step, pl_module, _meter(trainer))
        values = _missing_monitors(evaluation, trainer) | report.values()
        pl_module.log_dict(values, batch_size=1, logger=False)
        _log(report, trainer)
        if trainer.is_global_zero:
            loggers = [table_logger(logger, "experiment") for logger in trainer.loggers]
            self._writer.write(report, loggers)


class ServeCallback(AfterStep):
    """Answer the requests of a live endpoint between optimizer steps; close it after the last."""

    def __init__(self, server: LiveServer):
        """Take the `server` that `serve(engine, when=…)` returned, on this rank."""
        self.server = check_server(server)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.server.training_step = trainer.global_step

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.server.training_step = trainer.global_step
        if self.server.when == "step":
            self._answer(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.server.when == "evaluation" and not trainer.sanity_checking:
            self._answer(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._answer(trainer, pl_module, last=True)
        self.server.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.server.close()

    def _answer(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, last: bool = False
    ) -> None:
        with trainer.precision_plugin.forward_context():
            answer_requests(self.server, trainer.global_step, pl_module, _meter(trainer), last)


def _meter(trainer: Any) -> ThroughputMeter | None:
    """Return the throughput meter of the training, if a PackedCallback measures it."""
    callbacks = (c for c in trainer.callbacks if isinstance(c, PackedCallback))
    callback = next(callbacks, None)
    return None if callback is None else callback.meter


def _log(report: Report, trainer: pl.Trainer) -> None:
    """Write the metrics to the loggers once; `log_dict` would write them again at later steps."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as in all other rows of this step
    for logger in trainer.loggers if report.metrics else ():
        logger.log_metrics({"epoch": trainer.current_epoch, **report.metrics}, step=step)
        logger.save()


def _missing_monitors(evaluation: GenerationEval, trainer: pl.Trainer) -> dict[str, float]:
    """Return NaN for monitored metrics without a value: a failed harness reports no names."""
    monitors: list[Any] = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    names = (getattr(monitor, "monitor", None) for monitor in monitors)
    absent = (name for name in names if name is not None and name not in trainer.callback_metrics)
    return {name: math.nan for name in absent if evaluation.reports(name)}


def _is_run_end(trainer: pl.Trainer) -> bool:
    """Return whether the last epoch or step is done, and the run was not stopped before."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs and not trainer.should_stop
    return last_epoch or -1 < trainer.max_steps <= trainer.global_step
