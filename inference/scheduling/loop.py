"""Asynchronous step loop: plan and launch step k+1, then read the results of step k.

    plan k+1 ─▶ launch k+1 ─▶ read k ─▶ plan k+2 ─▶ …        host
    ───── k ──────┬───── k+1 ─────┬──── …                    device

A sampled token stays on the device as the input of the next step; the host reads it one step late.
An end of text is therefore noticed one step late, and the extra token is dropped. The loop only
knows token ids; the caller detokenizes and reports stop strings (`apply_stop_strings`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from ...attention.paging import PageCopy
from ..metrics.stats import Stats
from ..requests.request import Request
from .cache_checker import CacheChecker
from .scheduler import Scheduler, SchedulerOutput
from .speculation import Speculation
from .step import BatchParams, Step, StepOutput, build_step
from .step_costs import StepCosts

NOT_FINITE = "the model's logits are not numbers (NaN or infinite)"


class OutOfMemory(RuntimeError):
    """A step did not fit into memory; it had no effect."""


class Runner(Protocol):
    """Runs steps. `launch` may return before the step is done; its result waits for it."""

    lookahead: int
    """Steps that may be in flight while the next one is planned: 0 or 1."""

    @property
    def step_sizes(self) -> Sequence[int]:
        """Token counts, ascending, that steps are padded to; larger steps are not padded."""
        ...

    def copy_pages(self, copies: list[PageCopy]) -> None: ...
    def launch(self, step: Step) -> Callable[[], StepOutput]: ...


class StepLoop:
    """Continuous batching of requests over one scheduler and one runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        stats: Stats,
        clock: Callable[[], float] = perf_counter,
        cache_checker: CacheChecker | None = None,
        costs: StepCosts | None = None,
    ):
        self.scheduler = scheduler
        self.stats = stats
        self.clock = clock
        self.costs = costs or StepCosts()
        self.speculation: Speculation | None = None
        self._last_read_at = 0.0
        self._runner = runner
        self._batch_params = BatchParams(len(scheduler.page_table))
        self._cache_checker = cache_checker
        # The checker follows token ids, so it needs every one on the host.
        self._lookahead = 0 if cache_checker is not None else runner.lookahead
        self._in_flight = deque[tuple[Step, Callable[[], StepOutput], SchedulerOutput, float]]()
        """Each with the function that reads its results, its plan and the time of its launch."""

    @property
    def busy(self) -> bool:
        """Whether requests or steps are left."""
        return bool(self._in_flight or self.scheduler.running or self.scheduler.num_waiting)

    def step(self) -> list[Request]:
        """Run one step; return the finished requests, and those that need a check of new tokens.

        Requests with stop strings are not finished here: pass the result to `apply_stop_strings`
        before the next step.
        """
        start = self.clock()
        try:
            return self._step()
        finally:
            self.stats.record_step_time(self.clock() - start)

    def apply_stop_strings(self, updated: list[Request], stopped: Mapping[int, int]) -> None:
        """Finish requests with stop strings: those in `stopped`, and those at their `max_len`.

        updated: the result of `step` or `drain`.
        stopped: by id, the number of new tokens that complete a stop string.
        """
        for request in updated:
            if (length := stopped.get(request.id)) is not None:
                self.stats.new_tokens -= len(request.output_token_ids) - length
                del request.output_token_ids[length:], request.logprobs[length:]
            if request.finish_reason is None and request.params.stop:
                if request.id in stopped:
                    self._finish(request, "stop")
                elif request.at_max_len:
                    self._finish(request, "length")

    def abort(self, request: Request) -> None:
        """End a request now, with the tokens it has."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def drain(self) -> list[Request]:
        """Wait for the steps in flight; return the same as `step`."""
        updated = []
        while self._in_flight:
            updated += self._receive(*self._in_flight.popleft())
        return updated

    def _step(self) -> list[Request]:
        updated = self.scheduler.pop_overdue(self.clock())
        for request in updated:
            self._finish(request, "deadline")
        scheduler, page_size = self.scheduler, self.scheduler.pages.page_size
        speculation, has_drafts, max_tokens = self.speculation, False, self._max_tokens()
        if self._in_flight and speculation is not None and speculation.is_due(scheduler.running):
            return updated + self.drain()
        plan = scheduler.plan(max_tokens)
        if not self._in_flight and speculation is not None:
            has_drafts = speculation.add_drafts(plan, scheduler, max_tokens)
        if plan.admitted and speculation is not None:
            speculation.on_admitted()
        for request in plan.admitted:
            self._batch_params.admit(request)
            self.stats.record_admitted(request, self.clock())
        if plan.copies:
            self._runner.copy_pages(plan.copies)
        if plan.requests:
            start = self.clock()
            step = build_step(plan.requests, scheduler.page_table, page_size, self._batch_params)
            if self._cache_checker is not None:
                self._cache_checker.copy(plan.copies)
                self._cache_checker.check(step, scheduler.cache_salt)
            try:
                read = self._runner.launch(step)
                self._in_flight.append((step, read, plan, self.clock()))
            except OutOfMemory:
                if speculation is None or not speculation.discard(plan):
                    scheduler.reduce_load(len(step.token_ids))
                return updated + self.drain()
            scheduler.commit(plan)
            self.stats.record_step(start, step, scheduler)
        lookahead = self._lookahead if plan.requests and not has_drafts else 0
        while len(self._in_flight) > lookahead:
            updated += self._receive(*self._in_flight.popleft())
        return updated

    def _max_tokens(self) -> int | None:
        """Return the maximum tokens of the next step; None: the scheduler's own limit."""
        if not any(request.output_token_ids for request in self.scheduler.running):
            return None  # no request is decoding, so a long step delays no token
        return self.costs.max_tokens(self._runner.step_sizes)

    def _receive(
        self, step: Step, read: Callable[[], StepOutput], plan: SchedulerOutput, launched_at: float
    ) -> list[Request]:
        """Read the results of a step; drop the tokens of requests that ended meanwhile."""
        output, now = read(), self.clock()
        self.costs.record(len(step.token_ids), now - max(launched_at, self._last_read_at))
        self._last_read_at = now
        self.scheduler.on_prefilled(plan.prefilled)
        updated = [] if output.logprob is None else self._store_scores(step, output)
        tokens, counted = output.sampled_token_ids.tolist(), []
        for index in s.verify(step, tokens, now) if (s := self.speculation) else range(len(tokens)):
            request, token = step.sampled_requests[index], tokens[index]
            if request.finish_reason is not None:
                continue
            counted.append(index)
            if token < 0:
                self._finish(request, "error", NOT_FINITE)
                updated.append(request)
                continue
            request.output_token_ids.append(token)
            if request.needs_host_check:
                if not updated or updated[-1] is not request:
                    updated.append(request)
                if (top := request.params.logprobs) is not None:
                    request.logprobs.append((token, *_logprob_row(output, index, top)))
            if token in request.stop_token_ids:
                self._finish(request, "stop")
            elif request.at_max_len and not request.params.stop:
                self._finish(request, "length")
            else:
                continue
            if not request.needs_host_check:
                updated.append(request)
        self.stats.record_tokens(step.sampled_rows[counted], now)
        return updated + self._finish_scored(step)

    def _finish_scored(self, step: Step) -> list[Request]:
        """Finish the requests that are only scored and whose last token has its score."""
        finished = []
        for request, span in step.scored:
            is_done = request.max_len == request.prompt_len == span.stop + 1
            if is_done and request.finish_reason is None:
                self._finish(request, "length")
                finished.append(request)
        return finished

    def _store_scores(self, step: Step, output: StepOutput) -> list[Request]:
        """Store the scores of a step; end and return the requests whose scores are NaN."""
        assert output.logprob is not None and output.is_greedy is not None
        index, failed = len(step.sampled_requests), []
        for request, span in step.scored:
            top = request.params.prompt_logprobs or 0
            is_finite = not np.isnan(output.logprob[index : index + len(span)]).any()
            if not is_finite and request.finish_reason is None:
                self._finish(request, "error", NOT_FINITE)
                failed.append(request)
            for position in span:
                logprob, top_tokens, top_logprobs = _logprob_row(output, index, top)
                is_greedy = bool(output.is_greedy[index])
                request.scores[position + 1] = (logprob, is_greedy, top_tokens, top_logprobs)
                index += 1
        return failed

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        self.scheduler.finish(request, reason, error)
        if self.speculation is not None:
            self.speculation.record(request)
        self.stats.record_finish(request, self.clock())


def _logprob_row(output: StepOutput, index: int, top: int) -> tuple[float, list[int], list[float]]:
    assert output.logprob is not None
    assert output.top_tokens is not None and output.top_logprobs is not None
    top_tokens = output.top_tokens[index, :top].tolist()
    return float(output.logprob[index]), top_tokens, output.top_logprobs[index, :top].tolist()
