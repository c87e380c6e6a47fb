"""Evaluate by generation in the middle of a run, and leave no trace in it.

    every N steps ─▶ budget ─▶ generate (all ranks) ─▶ metrics (first rank) ─▶ Report (all ranks)

`GenerationEval` is handed what generates: an engine's `generate`, or one shared out over ranks, or
a harness object that brings its own tasks. It knows no trainer; `with_*_eval.py` plug it into one.
Whatever goes wrong in an evaluation is told in its report, on every rank alike, and training goes
on as if there had been none; only Ctrl-C stops it, or whatever else asks the process to leave.
"""

from __future__ import annotations

import difflib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from ...runtime import RankError, all_ranks_or_none, gather_objects, preserve_rng, rank
from ..fsdp_unshard import unsharded
from ..monitoring.throughput import away
from .budget import Allowance, Budget, subset
from .metrics import Metric
from .report import Report, Row, full_name
from .scoring import COUNTS, judge, read_numbers

log = logging.getLogger(__name__)

TAKEN = (*COUNTS, "seconds", "share_of_time")
"""Names that no metric can have."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and what its completion is held against."""

    prompt: Any
    """Text, token ids or messages."""
    reference: Any = None


class GenerationEval:
    """An evaluation, when it is due, and what it may cost."""

    def __init__(
        self,
        source: Callable[..., Any],
        examples: Iterable[Example] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        params: Any = None,
        *,
        every: int | None = None,
        name: str = "",
        deadline: float | None = None,
        max_share: float | None = None,
        samples: int = 4,
        watch: str | None = None,
        lower_is_better: bool = False,
        on_error: Literal["report", "raise"] = "report",
    ):
        """Say what to evaluate, and when.

        source: `generate(prompts, params, deadline=)`, giving completions; or, without examples, a
            harness, called with `deadline=` and giving metrics by name.
        params: how to continue the prompts, as the source takes it: one for all.
        every: steps between evaluations; None: only when the trainer evaluates. Either way after
            the last step, too, where the run is not stopped before.
        name: between `eval/` and the metric's name, where there are several evaluations.
        deadline: seconds one evaluation may take; what is not finished then does not count.
        max_share: of the run's time; evaluations that would exceed it are cut down or left out.
        samples: rows of the table of samples.
        watch: the metric whose best value is remembered; what is not finite is never the best.
        on_error: go on training, or let the error out.
        """
        metrics = {} if metrics is None else metrics
        examples = None if examples is None else list(examples)
        _check(source, metrics, every, samples, on_error)
        if examples is not None:
            _check_examples(examples, metrics, watch)
        self.every, self.watch, self.samples = every, watch, samples
        self.best: float | None = None
        self.budget = Budget(max_share, deadline)
        self._source, self._params = source, params
        self._examples, self._metrics = examples, dict(metrics)
        self._names = [*metrics] + [n for n in [watch] if n is not None and n not in metrics]
        self._told_names = examples is not None
        self.name = name
        self._sign = -1.0 if lower_is_better else 1.0
        self._on_error = on_error

    def due(self, step: int, last: bool = False) -> bool:
        """Say whether to evaluate after this step."""
        return last or (self.every is not None and step > 0 and step % self.every == 0)

    def run(self, step: int, model: Any = None) -> Report:
        """Evaluate now, on all ranks together.

        model: the one in training, if it may be sharded.
        """
        began = time.monotonic()
        size = 1 if self._examples is None else len(self._examples)
        plan = gather_objects(self.budget.allowance(size, self._examples is not None))[0]
        if plan.note:
            _say("evaluation after step %d %s", step, plan.note)
        if not plan.examples:
            return Report(step, note=plan.note, name=self.name, unknown=self._unknown({}))
        with preserve_rng(), away():
            found, rows, error = self._on_all_ranks(plan, model)
        seconds = time.monotonic() - began
        late = 0 if self._examples is None else int(found.get("unfinished", 0))
        self.budget.note(plan.examples - late if found else None, seconds)
        return self._report(step, found, rows, seconds, plan.note, error)

    def may_find(self, name: str) -> bool:
        """Say whether this is the full name of a metric; a harness's first report tells."""
        if self._told_names:
            return name in (full_name(self.name, own) for own in (*self._names, *TAKEN))
        return name.startswith(full_name(self.name, ""))

    def state_dict(self) -> dict:
        """What a checkpoint should keep."""
        return {"best": self.best}

    def load_state_dict(self, state: dict) -> None:
        self.best = state["best"]

    def _on_all_ranks(
        self, plan: Allowance, model: Any
    ) -> tuple[dict[str, float], list[Row], str | None]:
        """Evaluate; an error on one rank is an error on all."""

        def evaluate() -> tuple[dict[str, float], list[Row], str | None]:
            with unsharded(model):
                return self._evaluate(plan)

        try:
            return all_ranks_or_none(evaluate)[0]
        except Exception as error:
            if self._on_error == "raise":
                raise
            own = not isinstance(error, RankError)
            return {}, [], f"{type(error).__name__}: {error}" if own else str(error)

    def _evaluate(self, plan: Allowance) -> tuple[dict[str, float], list[Row], str | None]:
        if self._examples is None:
            found, error = read_numbers(self._source(deadline=plan.deadline))
            return found, [], error
        chosen = subset(len(self._examples), plan.examples)
        examples = [self._examples[i] for i in chosen]
        prompts = [example.prompt for example in examples]
        completions = self._source(prompts, self._params, deadline=plan.deadline)
        if rank() != 0:
            return {}, [], None
        found, rows, error = judge(self._metrics, chosen, examples, completions)
        return found, rows[: self.samples], error

    def _report(
        self,
        step: int,
        found: dict[str, float],
        rows: list[Row],
        seconds: float,
        note: str | None,
        error: str | None,
    ) -> Report:
        if error is not None:
            _say("evaluation after step %d: %s", step, error, level=logging.ERROR)
        self._learn(found)
        best = self._is_best(found.get(self.watch, math.nan)) if self.watch else False
        unknown = self._unknown(found)
        found = {**found, "seconds": seconds, "share_of_time": self.budget.share}
        named = {full_name(self.name, key): float(value) for key, value in found.items()}
        return Report(step, named, rows, seconds, best, note, error, self.name, unknown)

    def _learn(self, found: dict[str, float]) -> None:
        """Take the names of a harness's metrics from the first report that has some."""
        if self._told_names or not found:
            return
        self._names, self._told_names = list(found), True
        if self.watch is not None and self.watch not in found:
            near = difflib.get_close_matches(self.watch, self._names, 3, 0.0)
            _say("watch=%r is never found; the nearest there are %s", self.watch, near)

    def _unknown(self, found: dict[str, float]) -> tuple[str, ...]:
        return tuple(full_name(self.name, name) for name in self._names if name not in found)

    def _is_best(self, value: float) -> bool:
        """Compare with the best so far, and remember the better."""
        if not math.isfinite(value):
            return False
        before = self.best
        better = before is None or not math.isfinite(before) or self._sign * (value - before) > 0
        self.best = value if better else before
        return better


def _check(source: Any, metrics: Any, every: int | None, samples: int, on_error: str) -> None:
    """Refuse what is no setting at all."""
    if every is not None and not (_is_count(every) and every >= 1):
        raise ValueError(f"every is {every!r}; it must be steps from 1, or None")
    if not (_is_count(samples) and samples >= 0):
        raise ValueError(f"samples is {samples!r}; it must be rows from 0")
    if not callable(source):
        raise ValueError(f"source is a {type(source).__name__}; give what generates: x.generate")
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise ValueError(f"metrics is a {kind}; give functions by name, in a dict")
    if on_error not in ("report", "raise"):
        raise ValueError(f"on_error={on_error!r}: 'report' or 'raise'")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_examples(
    examples: list[Example], metrics: Mapping[str, Metric], watch: str | None
) -> None:
    """Refuse now what every evaluation would only report."""
    if not examples:
        raise ValueError("examples is empty; give at least one")
    for number, example in enumerate(examples):
        if not isinstance(example, Example):
            kind = type(example).__name__
            raise ValueError(f"example {number} is a {kind}; give Example(prompt, reference)")
    for name, metric in metrics.items():
        if not callable(metric):
            raise ValueError(f"metric {name!r} is a {type(metric).__name__}; give a function")
        if name in TAKEN:
            raise ValueError(f"a metric is named {name!r}, as what is counted: give another name")
    if watch is not None and watch not in {*metrics, *COUNTS}:
        raise ValueError(f"watch={watch!r}: there are {sorted(metrics)}")


def distinct(evaluations: Sequence[GenerationEval]) -> tuple[GenerationEval, ...]:
    """Refuse evaluations whose metrics would be logged under the same names."""
    names = [evaluation.name for evaluation in evaluations]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{len(twice)} evaluations are named {twice[0]!r}: give each its name=")
    return tuple(evaluations)


def states(evaluations: Sequence[GenerationEval]) -> dict:
    """What a checkpoint should keep of several."""
    return {"evaluations": [evaluation.state_dict() for evaluation in evaluations]}


def load_states(evaluations: Sequence[GenerationEval], state: dict) -> None:
    """Take what a checkpoint has kept of them."""
    kept = state["evaluations"]
    if len(kept) != len(evaluations):
        raise ValueError(
            f"the checkpoint keeps the best of {len(kept)} evaluations, and there are "
            f"{len(evaluations)}: give those of its run, in the same order"
        )
    for evaluation, own in zip(evaluations, kept, strict=True):
        evaluation.load_state_dict(own)


def _say(text: str, *values: Any, level: int = logging.WARNING) -> None:
    if rank() == 0:
        log.log(level, text, *values)
