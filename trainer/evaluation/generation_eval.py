"""`GenerationEval`: every N steps, within time limits, generate and score; keep the best value.

    every N steps ─▶ time budget ─▶ generate (all ranks) ─▶ metrics (rank 0) ─▶ Report (all ranks)

`GenerationEval` calls a function that generates: `generate` of an engine or a `DataParallelEngine`,
or a harness with its own tasks. It does not depend on a trainer; the `with_*` packages run it in
one. An error in an evaluation is reported, the same on every rank, and training continues as if
there had been no evaluation; only Ctrl-C and process exits are raised.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from ...runtime import (
    RankError,
    all_ranks_or_none,
    draw_stream,
    gather_objects,
    preserve_rng,
    rank,
)
from ..fsdp_unshard import unsharded
from ..monitoring.throughput import ThroughputMeter
from .completion_scores import COUNTERS, Scores, join_errors, score_completions, to_floats
from .eval_report import Example, Report, TableRow, full_name
from .metrics import Metric
from .report_writer import append_completions
from .time_budget import EvalPlan, TimeBudget, subset

log = logging.getLogger(__name__)

RESERVED_NAMES = (*COUNTERS, "seconds", "share_of_time")
"""Names that a metric cannot have."""


class GenerationEval:
    """An evaluation: examples and metrics, the steps at which it runs, and its time limits."""

    def __init__(
        self,
        generate: Callable[..., Any],
        examples: Iterable[Example] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        params: Any = None,
        *,
        every: int | None = None,
        name: str = "",
        deadline: float | None = None,
        max_time_share: float | None = None,
        num_samples: int = 4,
        output: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        on_error: Literal["report", "raise"] = "report",
    ):
        """Define an evaluation.

        Args:
            generate: called as `generate(prompts, params, deadline=)`, returns completions. Without
                examples, a harness, called with `deadline=`, that returns metrics by name.
            examples: prompts with the references that metrics compare with; None for a harness.
            metrics: functions by name; each takes a completion's text and its reference and returns
                a number. Their means over all completions are logged, including all `n` of a
                prompt. If a metric raises for one completion, or returns no number, it has no mean.
            params: sampling parameters of all prompts, passed on to `generate`.
            every: optimizer steps between evaluations; None: only when the trainer evaluates.
                Unless the run is stopped early, the evaluation also runs after the last step.
            name: inserted between `eval/` and the metric's name; needed for several evaluations.
            deadline: seconds that one evaluation may take; unfinished completions are not scored,
                but counted as `timed_out`.
            max_time_share: largest fraction of the run's time; evaluations that would exceed it run
                on fewer examples or are skipped.
            num_samples: completions shown in the table.
            output: JSONL file to which every evaluation appends all completions that it scored.
            monitor: the metric whose best value is tracked; NaN and infinity are never the best.
            mode: whether the best value is the largest or the smallest.
            on_error: "report" an error of generation or of a metric and continue training, or
                "raise" it. Requests that failed are reported and counted in both cases.
        """
        metrics = {} if metrics is None else metrics
        if examples is not None and not isinstance(examples, Iterable):
            raise ValueError(f"examples is a {type(examples).__name__}; pass a list of Example")
        examples = None if examples is None else list(examples)
        _check_settings(generate, metrics, every, num_samples, mode, on_error)
        if examples is not None:
            _check_examples(examples, metrics, monitor)
        _check_output(output, examples)
        self.every, self.monitor, self.num_samples = every, monitor, num_samples
        self.best: float | None = None
        self.budget = TimeBudget(max_time_share, deadline)
        self._generate, self._params = generate, params
        self._examples, self._metrics = examples, dict(metrics)
        self._names = [*metrics] + [n for n in [monitor] if n is not None and n not in metrics]
        self._names_are_known = examples is not None
        self._output = None if output is None else Path(output)
        self.name = name
        self._sign = -1.0 if mode == "min" else 1.0
        self._on_error = on_error

    def due(self, step: int, last: bool = False) -> bool:
        """Return whether to evaluate after this `step`; always after the `last` one."""
        return last or (self.every is not None and step > 0 and step % self.every == 0)

    def run(self, step: int, model: Any = None, meter: ThroughputMeter | None = None) -> Report:
        """Evaluate now; call it on all ranks.

        Args:
            step: the optimizer step that the report names.
            model: the model in training, if it may be sharded by FSDP2.
            meter: the training's throughput meter, paused during the evaluation.
        """
        start = time.monotonic()
        size = 1 if self._examples is None else len(self._examples)
        plan = gather_objects(self.budget.plan(size, self._examples is not None))[0]
        if plan.note:
            _log_on_rank_0("evaluation after step %d %s", step, plan.note)
        if not plan.num_examples:
            return Report(step, note=plan.note, name=self.name, missing=self._missing({}))
        with preserve_rng(), nullcontext() if meter is None else meter.paused():
            values, rows, error = self._run_on_all_ranks(step, plan, model)
        seconds = time.monotonic() - start
        finished = plan.num_examples * _finished_share(values) if values else None
        self.budget.record(finished, seconds)
        return self._report(step, values, rows, seconds, plan.note, error)

    def reports(self, name: str) -> bool:
        """Return whether `name` is the full name of a metric of this evaluation.

        The metrics of a harness are known after its first report; before, every name that starts
        with this evaluation's prefix may be one.
        """
        if self._names_are_known:
            names = (*self._names, *RESERVED_NAMES)
            return name in (full_name(self.name, metric) for metric in names)
        return name.startswith(full_name(self.name, ""))

    def state_dict(self) -> dict:
        """Return the best value, for a checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state: dict) -> None:
        """Restore the best value from a `state`."""
        self.best = state["best"]

    def _run_on_all_ranks(
        self, step: int, plan: EvalPlan, model: Any
    ) -> tuple[dict[str, float], list[TableRow], str | None]:
        """Evaluate; an error on one rank is an error on all."""

        def evaluate() -> tuple[dict[str, float], list[TableRow], str | None]:
            with unsharded(model), draw_stream(full_name(self.name, "")):
                return self._evaluate(step, plan)

        try:
            return all_ranks_or_none(evaluate)[0]
        except Exception as error:
            if self._on_error == "raise":
                raise
            is_own = not isinstance(error, RankError)
            return {}, [], f"{type(error).__name__}: {error}" if is_own else str(error)

    def _evaluate(
        self, step: int, plan: EvalPlan
    ) -> tuple[dict[str, float], list[TableRow], str | None]:
        scores = self._scores(plan)
        if scores.metric_errors is not None and self._on_error == "raise":
            raise ValueError(scores.metric_errors)
        error = join_errors(
            scores.request_errors, scores.metric_errors, self._save(step, scores.rows)
        )
        return scores.values, scores.rows[: self.num_samples], error

    def _save(self, step: int, rows: list[TableRow]) -> str | None:
        """Write all completions to the output file, if there is one; return the error."""
        if self._output is None or rank() != 0:
            return None
        try:
            append_completions(self._output, step, self.name, rows)
        except OSError as error:
            return f"completions are not saved to {self._output}: {error}"
        return None

    def _scores(self, plan: EvalPlan) -> Scores:
        """Generate and score; without examples the harness does both."""
        if self._examples is None:
            return to_floats(self._generate(deadline=plan.deadline))
        indices = subset(len(self._examples), plan.num_examples)
        examples = [self._examples[i] for i in indices]
        prompts = [example.prompt for example in examples]
        completions = self._generate(prompts, self._params, deadline=plan.deadline)
        if rank() != 0:
            return Scores({}, [])
        return score_completions(self._metrics, indices, examples, completions)

    def _report(
        self,
        step: int,
        values: dict[str, float],
        rows: list[TableRow],
        seconds: float,
        note: str | None,
        error: str | None,
    ) -> Report:
        if error is not None:
            _log_on_rank_0("evaluation after step %d: %s", step, error, level=logging.ERROR)
        self._learn_names(values)
        best = self._is_best(values.get(self.monitor, math.nan)) if self.monitor else False
        missing = self._missing(values)
        values = {**values, "seconds": seconds, "share_of_time": self.budget.time_share}
        metrics = {full_name(self.name, key): float(value) for key, value in values.items()}
        saved = self._output is not None
        return Report(step, metrics, rows, seconds, best, note, error, self.name, missing, saved)

    def _learn_names(self, values: dict[str, float]) -> None:
        """Take the names of a harness's metrics from the first report that has any."""
        if self._names_are_known or not values:
            return
        self._names, self._names_are_known = list(values), True
        if self.monitor is not None and self.monitor not in values:
            near = difflib.get_close_matches(self.monitor, self._names, 3, 0.0)
            _log_on_rank_0(
                "monitor=%r is not reported; the closest names are %s", self.monitor, near
            )

    def _missing(self, values: dict[str, float]) -> tuple[str, ...]:
        return tuple(full_name(self.name, name) for name in self._names if name not in values)

    def _is_best(self, value: float) -> bool:
        """Compare with the best value so far, and keep the better one."""
        if not math.isfinite(value):
            return False
        before = self.best
        better = before is None or not math.isfinite(before) or self._sign * (value - before) > 0
        self.best = value if better else before
        return better


def _finished_share(values: dict[str, float]) -> float:
    """Return the fraction of completions within the deadline; 1 for a harness."""
    finished, late = (values.get(n, 0) for n in ("examples", "timed_out"))
    total = finished + values.get("failed", 0) + late
    return 1 - late / total if total else 1.0


def _check_settings(
    generate: Any, metrics: Any, every: int | None, num_samples: int, mode: str, on_error: str
) -> None:
    """Refuse invalid settings."""
    if every is not None and not (_is_int(every) and every >= 1):
        raise ValueError(f"every is {every!r}; it must be a number of steps >= 1, or None")
    if not (_is_int(num_samples) and num_samples >= 0):
        raise ValueError(f"num_samples is {num_samples!r}; it must be a number from 0")
    if not callable(generate):
        name = type(generate).__name__
        raise ValueError(f"generate is a {name}; pass a function, such as engine.generate")
    if not isinstance(metrics, Mapping):
        name = type(metrics).__name__
        raise ValueError(f"metrics is a {name}; pass a dict of functions by name")
    if mode not in ("max", "min"):
        raise ValueError(f"mode={mode!r}: pass 'max' or 'min'")
    if on_error not in ("report", "raise"):
        raise ValueError(f"on_error={on_error!r}: pass 'report' or 'raise'")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_examples(
    examples: list[Example], metrics: Mapping[str, Metric], monitor: str | None
) -> None:
    """Refuse settings that would make every evaluation fail."""
    if not examples:
        raise ValueError("examples is empty; pass at least one")
    for index, example in enumerate(examples):
        if not isinstance(example, Example):
            name = type(example).__name__
            raise ValueError(f"example {index} is a {name}; pass Example(prompt, reference)")
    for name, metric in metrics.items():
        if not callable(metric):
            raise ValueError(f"metric {name!r} is a {type(metric).__name__}; pass a function")
        if name in RESERVED_NAMES:
            raise ValueError(f"metric name {name!r} is reserved: choose another")
    if monitor is not None and monitor not in {*metrics, *COUNTERS}:
        raise ValueError(f"monitor={monitor!r} is not a metric: there are {sorted(metrics)}")


def _check_output(output: Any, examples: list[Example] | None) -> None:
    """Refuse a path that cannot be a file, or that would stay empty."""
    if output is None:
        return
    if not isinstance(output, str | os.PathLike):
        raise ValueError(f"output is a {type(output).__name__}; pass the path of a JSONL file")
    if Path(output).is_dir():
        raise ValueError(f"output={os.fspath(output)!r} is a folder; pass the path of a JSONL file")
    if examples is None:
        raise ValueError(f"output={os.fspath(output)!r} needs examples: a harness returns no texts")


def check_unique_names(evaluations: Sequence[GenerationEval]) -> tuple[GenerationEval, ...]:
    """Refuse evaluations whose metrics would be logged under the same names."""
    names = [evaluation.name for evaluation in evaluations]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} evaluations are named {repeated[0]!r}: give each a different name="
        )
    return tuple(evaluations)


def eval_states(evaluations: Sequence[GenerationEval]) -> dict:
    """Return the best values of several evaluations, for a checkpoint."""
    return {"evaluations": [evaluation.state_dict() for evaluation in evaluations]}


def load_eval_states(evaluations: Sequence[GenerationEval], state: dict) -> None:
    """Restore several evaluations from a checkpoint."""
    saved = state["evaluations"]
    if len(saved) != len(evaluations):
        raise ValueError(
            f"the checkpoint holds the best values of {len(saved)} evaluations, but there are "
            f"{len(evaluations)}: pass the evaluations of its run, in the same order"
        )
    for evaluation, evaluation_state in zip(evaluations, saved, strict=True):
        evaluation.load_state_dict(evaluation_state)


def _log_on_rank_0(text: str, *values: Any, level: int = logging.WARNING) -> None:
    if rank() == 0:
        log.log(level, text, *values)
