"""Evaluation by generation in an Accelerate loop.

    engine = Engine(accelerator.unwrap_model(model), tokenizer)
    evaluations = AccelerateEval(accelerator, model, GenerationEval(engine.generate, ...))
    ...
            optimizer.step()
            for report in evaluations.after_step(step):
                if report.is_best:
                    accelerator.save_state("best")

Call it on every rank, after the optimizer step. Metrics go to the accelerator's trackers.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from ..evaluation.generation_eval import GenerationEval, distinct, load_states, states
from ..evaluation.report import Report
from ..evaluation.tables import show, writer


class AccelerateEval:
    """Run evaluations when they are due, and log what they find."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        *evaluations: GenerationEval,
        console: bool = False,
    ):
        """console: print samples, too."""
        self.accelerator, self.model = accelerator, model
        self.evaluations, self.console = distinct(evaluations), console

    def after_step(self, step: int, last: bool = False) -> list[Report]:
        """Evaluate what is due after this optimizer step; the same reports on every rank.

        last: this was the last step, so everything is due.
        """
        due = [evaluation for evaluation in self.evaluations if evaluation.due(step, last)]
        return [self._run(evaluation, step) for evaluation in due]

    def state_dict(self) -> dict:
        """The best values so far: `accelerator.register_for_checkpointing(evaluations)`."""
        return states(self.evaluations)

    def load_state_dict(self, state: dict) -> None:
        load_states(self.evaluations, state)

    def _run(self, evaluation: GenerationEval, step: int) -> Report:
        with self.accelerator.autocast():
            report = evaluation.run(step, self.model)
        if report.metrics:
            self.accelerator.log(report.metrics, step=step)
        if self.accelerator.is_main_process:
            trackers = self.accelerator.trackers
            show(report, [writer(tracker, "writer") for tracker in trackers], self.console)
        return report
