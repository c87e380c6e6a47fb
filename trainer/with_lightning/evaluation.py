"""Evaluation by generation in Lightning.

    engine = Engine(module.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    best = ModelCheckpoint(monitor="eval/exact", mode="max", every_n_train_steps=500)
    Trainer(callbacks=[EvalCallback(evaluation), best], ...)

With `every=None` it runs at the end of each validation instead, and after the last step.

A metric that an evaluation has no value for, because it failed or was left out, is NaN: checkpoints
take it for the worst. `EarlyStopping` stops at it: give that `check_finite=False`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ..evaluation.generation_eval import GenerationEval, distinct, load_states, states
from ..evaluation.report import Report
from ..evaluation.tables import show, writer
from .packs import AfterStep, pl

log = logging.getLogger(__name__)


class EvalCallback(AfterStep):
    """Run evaluations when they are due, and log what they find."""

    def __init__(self, *evaluations: GenerationEval, console: bool = False):
        """console: print samples, too."""
        self.evaluations, self.console = distinct(evaluations), console
        self._ran: dict[str, int] = {}
        """After which step each of them ran last."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._ran.clear()
        for stop in trainer.early_stopping_callbacks:
            name, own = stop.monitor, any(e.may_find(stop.monitor) for e in self.evaluations)
            if own and stop.check_finite and trainer.is_global_zero:
                log.warning(
                    "EarlyStopping(%r) stops at an evaluation without a value, which failed or was "
                    "left out: give it check_finite=False to train on",
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
        if not _ends(trainer):
            return
        for evaluation in self.evaluations:
            if self._ran.get(evaluation.name) != trainer.global_step:
                self._run(evaluation, trainer, pl_module)

    def state_dict(self) -> dict:
        return states(self.evaluations)

    def load_state_dict(self, state_dict: dict) -> None:
        load_states(self.evaluations, state_dict)

    def _run(
        self, evaluation: GenerationEval, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        self._ran[evaluation.name] = trainer.global_step
        with trainer.precision_plugin.forward_context():
            report = evaluation.run(trainer.global_step, pl_module)
        found = _monitored(evaluation, trainer) | report.values()
        pl_module.log_dict(found, batch_size=1, logger=False)
        _log(report, trainer)
        if trainer.is_global_zero:
            loggers = [writer(logger, "experiment") for logger in trainer.loggers]
            show(report, loggers, self.console)


def _log(report: Report, trainer: pl.Trainer) -> None:
    """Write a row: what a module logs is written at the next logging step, and again until new."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as all rows of this step have it
    for logger in trainer.loggers if report.metrics else ():
        logger.log_metrics({"epoch": trainer.current_epoch, **report.metrics}, step=step)
        logger.save()


def _monitored(evaluation: GenerationEval, trainer: pl.Trainer) -> dict[str, float]:
    """NaN for what a monitor would miss: a harness that failed has not even told its names."""
    monitors: list[Any] = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    names = (getattr(monitor, "monitor", None) for monitor in monitors)
    missed = (name for name in names if name is not None and name not in trainer.callback_metrics)
    return {name: math.nan for name in missed if evaluation.may_find(name)}


def _ends(trainer: pl.Trainer) -> bool:
    """Whether this is the end of the last epoch, and nobody stopped the run before."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs and not trainer.should_stop
    return last_epoch or -1 < trainer.max_steps <= trainer.global_step
