"""Run requests on a borrowed model: what all calls of an engine share.

groups ─▶ queue ─▶ step, step, … ─▶ detokenize, stop ─▶ events of the call that submitted them

Prompts of `generate` are read and queued a few at a time, while the device runs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.output_processor import EventQueue, OutputProcessor
from .requests.outputs import Completion
from .requests.request import Request
from .requests.request_builder import InvalidPrompt
from .requests.request_group import RequestGroup
from .scheduling.loop import StepLoop
from .session import ModelSession, WeightsCheck

MIN_QUEUED = 64
"""Requests whose prompts are read before a step, or more to fill it: a cached prefix may leave few
tokens of each to run."""


class RequestRunner:
    """Queue requests, run steps and hand out results; every method needs the model's lock."""

    def __init__(
        self, session: ModelSession, outputs: OutputProcessor, stats: Stats, trace: RequestTrace
    ):
        self._session = session
        self._outputs = outputs
        self._stats = stats
        self._trace = trace

    @property
    def loop(self) -> StepLoop:
        return self._session.loop

    @contextmanager
    def borrow_model(self, weights_check: WeightsCheck = "full") -> Iterator[None]:
        """Borrow the model; if a fault drops the executor, all requests end with an error."""
        try:
            with self._session.borrow(weights_check) as updated:
                self._process_outputs(updated)
                yield
        except BaseException as error:
            if self._session.executor is None:
                self.fail_all(f"the engine stopped on an error ({type(error).__name__})")
            raise

    def start_trace(self) -> None:
        """Drop the trace of earlier calls, unless their requests are still active."""
        if not self._outputs.has_requests():
            self._trace.clear()

    def run_to_completion(
        self,
        groups: Iterable[RequestGroup],
        on_finished: Callable[[int], Any] = lambda num_finished: None,
        paced: bool = False,
    ) -> dict[int, Completion]:
        """Run steps until all groups are done; return their completions by id.

        paced: taking a group takes time, so take a few before every step. If one of them has an
            invalid prompt, those before it are aborted.
        """
        events, active = EventQueue(), dict[int, RequestGroup]()
        backlog, start = self._requests(groups, events, active), self.loop.clock()
        completions: dict[int, Completion] = {}
        try:
            while True:
                has_more = self.queue_backlog(backlog, start, paced)
                new = {e.request_id: e.completion for e in events if e.completion is not None}
                events.clear()
                if new:
                    completions |= new
                    for group_id in new:
                        del active[group_id]
                    on_finished(len(new))
                if not has_more and not active:
                    return completions
                self.run_step()
        except InvalidPrompt:  # the executor stays, for requests of other callers
            for group in active.values():
                self.abort(group)
                self._outputs.remove(group)
            raise

    def _requests(
        self, groups: Iterable[RequestGroup], events: EventQueue, active: dict[int, RequestGroup]
    ) -> Iterator[Request]:
        """Yield the requests of groups; a group is active as soon as it is taken."""
        for group in groups:
            active[group.id] = group
            self._outputs.add([group], events)
            yield from group.requests

    def run_step(self) -> None:
        """Run one step of all active requests, and hand out its results."""
        self._process_outputs(self.loop.step())
        if self._session.settings.debug:
            self.loop.scheduler.check()

    def queue(self, request: Request, since: float) -> None:
        """Queue a request, which waits until the scheduler admits it; it was sent at `since`."""
        self._stats.record_queued(request, since)
        self.loop.scheduler.add(request)

    def queue_backlog(self, backlog: Iterator[Request], since: float, paced: bool = False) -> bool:
        """Queue requests, up to `max_waiting`; return whether more may be left.

        Args:
            since: when they were sent.
            paced: queue no more than the next step can use.
        """
        scheduler = self.loop.scheduler
        num_requests = num_tokens = 0
        while scheduler.queue_error(1) is None:
            max_tokens = scheduler.max_num_batched_tokens
            if paced and num_requests >= MIN_QUEUED and num_tokens >= max_tokens:
                break
            if (request := next(backlog, None)) is None:
                return False
            if request.finish_reason is None:
                self.queue(request, since)
                num_requests += 1
                num_tokens += request.prompt_len
        return True

    def abort(self, group: RequestGroup) -> list[Request]:
        """End the unfinished requests of a group, and return them."""
        unfinished = [request for request in group.requests if request.finish_reason is None]
        for request in unfinished:
            self.loop.abort(request)
        return unfinished

    def fail_all(self, error: str) -> None:
        """End all active requests with an error."""
        for request in self._outputs.fail_all(error):
            self._stats.record_finish(request, perf_counter())
            num_tokens = len(request.output_token_ids)
            self._trace.add(request.id, "finished", why="error", tokens=num_tokens)

    def _process_outputs(self, updated: list[Request]) -> None:
        """Detokenize new tokens, end the requests that reached a stop string, queue events."""
        stopped = self._outputs.detokenize(updated)
        self.loop.apply_stop_strings(updated, stopped)
        self._outputs.publish(updated)
