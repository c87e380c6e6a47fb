"""The engine's heart: plan a step, launch it, and read the step before while it runs.

    plan k+1 ─▶ launch k+1 ─▶ read k ─▶ plan k+2 ─▶ …        host
    ───── k ──────┬───── k+1 ─────┬──── …                    device

The token a step yields stays on the device and feeds the next one; the host learns it one step
late. So an end of text is noticed one step late as well, and that step's token for it is dropped.
Only token ids here: no text, no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from ...attention.paging import PageCopy
from ..metrics.stats import Stats
from ..requests.request import Request
from .cache_checker import CacheChecker
from .scheduler import Plan, Scheduler
from .slot_params import SlotParams
from .step import Step, build


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step gave, on the host; the arrays of likelihoods have one row per row of logits."""

    tokens: np.ndarray
    logprob: np.ndarray | None = None
    greedy: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


class OutOfMemory(RuntimeError):
    """A step did not fit; nothing of it counts."""


class Runner(Protocol):
    """Runs steps. `launch` may return before the step is done; what it returns waits for it."""

    lookahead: int
    """Steps that may be under way while the next one is planned."""

    def copy_pages(self, copies: list[PageCopy]) -> None: ...
    def launch(self, step: Step) -> Callable[[], StepOutput]: ...


class Loop:
    """Continuous batching of requests that are lists of token ids."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        columns: SlotParams,
        stats: Stats,
        clock: Callable[[], float] = perf_counter,
        ends: Callable[[Request], bool] = lambda request: False,
        canary: CacheChecker | None = None,
    ):
        self.scheduler = scheduler
        self.stats = stats
        self.clock = clock
        self._runner = runner
        self._columns = columns
        self._ends = ends
        self._canary = canary
        self._depth = 0 if canary is not None else runner.lookahead
        self._flying: deque[tuple[Step, Callable[[], StepOutput], Plan]] = deque()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._flying or self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Request]:
        """Run one step; return the requests that ended, and the watched ones with a new token."""
        began = self.clock()
        try:
            return self._step()
        finally:
            self.stats.note_time(self.clock() - began)

    def _step(self) -> list[Request]:
        news = self._expire()
        plan = self.scheduler.plan()
        if plan.copies:
            self._runner.copy_pages(plan.copies)
        if plan.requests:
            began = self.clock()
            page = self.scheduler.pages.page_size
            step = build(plan.requests, self.scheduler.table, page, self._columns)
            if self._canary is not None:
                self._canary.copy(plan.copies)
                self._canary.check(step, self.scheduler.scope)
            try:
                self._flying.append((step, self._runner.launch(step), plan))
            except OutOfMemory:
                self.scheduler.shrink()
                return news + self.drain()
            self.scheduler.commit(plan)
            self.stats.note_step(began, step, self.scheduler)
        while self._flying and (len(self._flying) > self._depth or not plan.requests):
            news += self._receive(*self._flying.popleft())
        return news

    def abort(self, request: Request) -> None:
        """End a request now with what it has."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def drain(self) -> list[Request]:
        """Wait for the steps under way."""
        news = []
        while self._flying:
            news += self._receive(*self._flying.popleft())
        return news

    def _expire(self) -> list[Request]:
        late = self.scheduler.overdue(self.clock())
        for request in late:
            self._finish(request, "deadline")
        return late

    def _receive(self, step: Step, read: Callable[[], StepOutput], plan: Plan) -> list[Request]:
        """Take in what a step gave; requests that ended meanwhile get nothing more."""
        results, now = read(), self.clock()
        self.scheduler.note_prefilled(plan.prefilled)
        if results.logprob is not None:
            self._score(step, results)
        news: list[Request] = []
        dropped: list[int] = []
        for row, (request, token) in enumerate(
            zip(step.yielding, results.tokens.tolist(), strict=True)
        ):
            if request.finish_reason is not None:
                dropped.append(row)
                continue
            if request.watched or token < 0:
                self._accept(request, token, row, results)
                news.append(request)
                continue
            output = request.output
            output.append(token)
            if token in request.stop_ids:
                self._finish(request, "stop")
                news.append(request)
            elif len(output) >= request.limit - len(request.prompt):
                self._finish(request, "length")
                news.append(request)
        slots = np.delete(step.yield_slots, dropped) if dropped else step.yield_slots
        self.stats.note_tokens(slots, now)
        for request, span in step.scored:
            whole = request.limit == len(request.prompt) == span.stop + 1
            if whole and request.finish_reason is None:
                self._finish(request, "length")
                news.append(request)
        return news

    def _accept(self, request: Request, token: int, row: int, results: StepOutput) -> None:
        """Add a token to a request whose every token is looked at."""
        if token < 0:
            self._finish(request, "error", "the model's logits are not numbers (NaN or infinite)")
            return
        request.output.append(token)
        if request.params.logprobs is not None:
            request.logprobs.append((token, *_likelihood(results, row, request.params.logprobs)))
        if self._ends(request) or token in request.stop_ids:
            self._finish(request, "stop")
        elif len(request.prompt) + len(request.output) == request.limit:
            self._finish(request, "length")

    def _score(self, step: Step, results: StepOutput) -> None:
        assert results.greedy is not None
        row = len(step.yielding)
        for request, span in step.scored:
            top = request.params.prompt_logprobs or 0
            for position in span:
                logprob, best, others = _likelihood(results, row, top)
                likeliest = bool(results.greedy[row])
                request.scores[position + 1] = (logprob, likeliest, best, others)
                row += 1

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        self.scheduler.finish(request, reason, error)
        self.stats.note_finish(request, self.clock())


def _likelihood(results: StepOutput, row: int, top: int) -> tuple[float, list[int], list[float]]:
    assert results.logprob is not None
    assert results.top_tokens is not None and results.top_logprobs is not None
    best = results.top_tokens[row, :top].tolist()
    return float(results.logprob[row]), best, results.top_logprobs[row, :top].tolist()
