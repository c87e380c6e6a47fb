"""Evaluation by generation, and requests of a live endpoint, in an Accelerate loop.

    engine = Engine(accelerator.unwrap_model(model), tokenizer)
    evaluations = AccelerateEval(accelerator, model, GenerationEval(engine.generate, ...))
    ...
            optimizer.step()
            for report in evaluations.after_step(step):
                if report.is_best:
                    accelerator.save_state("best")

Call `after_step` on every rank, after the optimizer step. Metrics are logged to the accelerator's
trackers.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

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


class AccelerateEval:
    """Run evaluations when they are due, and log their metrics and completions."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        *evaluations: GenerationEval,
        meter: ThroughputMeter | None = None,
        console: bool = False,
    ):
        """Evaluate a prepared model; `max_time_share` counts the run's time from here.

        Args:
            accelerator: the one that prepared the model; metrics go to its trackers.
            model: the prepared model.
            evaluations: one or several; several need different names.
            meter: the loop's throughput meter, paused during evaluations.
            console: also print metrics and completions.
        """
        self.accelerator, self.model, self.meter = accelerator, model, meter
        self.evaluations = check_unique_names(evaluations)
        self._writer = ReportWriter(console)
        for evaluation in self.evaluations:
            evaluation.budget.restart()

    def after_step(self, step: int, last: bool = False) -> list[Report]:
        """Run the evaluations due after this optimizer step; return the same reports on every rank.

        Args:
            step: number of optimizer steps so far, from 1.
            last: this was the last step, so every evaluation is due.
        """
        due = [evaluation for evaluation in self.evaluations if evaluation.due(step, last)]
        return [self._run(evaluation, step) for evaluation in due]

    def state_dict(self) -> dict:
        """Return the best values; `accelerator.register_for_checkpointing(...)` saves them."""
        return eval_states(self.evaluations)

    def load_state_dict(self, state: dict) -> None:
        """Restore the best values from a `state`."""
        load_eval_states(self.evaluations, state)

    def _run(self, evaluation: GenerationEval, step: int) -> Report:
        with self.accelerator.autocast():
            report = evaluation.run(step, self.model, self.meter)
        if report.metrics:
            self.accelerator.log(report.metrics, step=step)
        if self.accelerator.is_main_process:
            trackers = self.accelerator.trackers
            self._writer.write(report, [table_logger(tracker, "writer") for tracker in trackers])
        return report


class AccelerateServe:
    """Answer the requests of a live endpoint between optimizer steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        server: LiveServer,
        *,
        meter: ThroughputMeter | None = None,
    ):
        """Take the server.

        Args:
            accelerator: the one that prepared the model.
            model: the prepared model.
            server: what `serve(engine, when=…)` returned, on this rank.
            meter: the loop's throughput meter, paused while requests run.
        """
        self.accelerator, self.model, self.meter = accelerator, model, meter
        self.server = check_server(server)

    def after_step(self, step: int, last: bool = False) -> None:
        """Run the requests that are due; call it on every rank after each optimizer step.

        Args:
            step: number of optimizer steps so far, from 1.
            last: this was the last step: answer all that wait, and close the server.
        """
        self.server.training_step = step
        with self.accelerator.autocast():
            answer_requests(self.server, step, self.model, self.meter, last)
        if last:
            self.server.close()
