"""Evaluation by generation in Lightning.

    engine = Engine(module.model, tokenizer)
    evaluation = GenerationEval(engine.generate, examples, {"exact": exact_match}, every=500)
    best = ModelCheckpoint(monitor="eval/exact", mode="max")
    Trainer(callbacks=[EvalCallback(evaluation), best], ...)

With `every=None` it runs at the end of each validation instead.
"""

from __future__ import annotations

from typing import Any

from .evaluation import GenerationEval, distinct
from .evaluation_table import show
from .with_lightning import AfterStep, pl


class EvalCallback(AfterStep):
    """Run evaluations when they are due, and log what they find."""

    def __init__(self, *evaluations: GenerationEval, console: bool = False):
        """console: print samples, too."""
        self.evaluations, self.console = distinct(evaluations), console

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

    def state_dict(self) -> dict:
        return {"evaluations": [evaluation.state_dict() for evaluation in self.evaluations]}

    def load_state_dict(self, state_dict: dict) -> None:
        for evaluation, own in zip(self.evaluations, state_dict["evaluations"], strict=True):
            evaluation.load_state_dict(own)

    def _run(
        self, evaluation: GenerationEval, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        with trainer.precision_plugin.forward_context():
            report = evaluation.run(trainer.global_step, pl_module)
        if report.metrics:
            pl_module.log_dict(report.metrics, batch_size=1)
        if trainer.is_global_zero:
            loggers = [_writer(logger) for logger in trainer.loggers]
            show(report, loggers, self.console)


def _writer(logger: Any) -> Any:
    """What takes tables, or TensorBoard's writer inside its logger."""
    return logger if hasattr(logger, "log_table") else getattr(logger, "experiment", None)
