"""Run requests on a borrowed model: what all calls of an engine share.

groups ─▶ queue ─▶ step, step, … ─▶ detokenize, stop ─▶ events of the call that submitted them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.output_processor import EventQueue, OutputProcessor
from .requests.outputs import Completion
from .requests.request import Request
from .requests.request_group import RequestGroup, longest_first
from .scheduling.loop import StepLoop
from .session import ModelSession, WeightsCheck


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
        groups: list[RequestGroup],
        on_finished: Callable[[int], Any] = lambda num_finished: None,
    ) -> dict[int, Completion]:
        """Run steps until all groups are done; return their completions by id."""
        events, backlog = EventQueue(), longest_first(groups)
        self._outputs.add(groups, events)
        completions: dict[int, Completion] = {}
        while True:
            new = {e.request_id: e.completion for e in events if e.completion is not None}
            events.clear()
            if new:
                completions |= new
                on_finished(len(new))
            if len(completions) == len(groups):
                return completions
            self.queue_backlog(backlog)
            self.run_step()

    def run_step(self) -> None:
        """Run one step of all active requests, and hand out its results."""
        self._process_outputs(self.loop.step())
        if self._session.settings.debug:
            self.loop.scheduler.check()

    def queue(self, requests: Sequence[Request]) -> None:
        """Queue requests, which wait until the scheduler admits them."""
        loop = self.loop
        for request in requests:
            self._stats.record_queued(request, loop.clock())
            loop.scheduler.add(request)

    def queue_backlog(self, backlog: deque[Request]) -> None:
        """Queue requests until `max_waiting` is reached."""
        scheduler = self.loop.scheduler
        while backlog and scheduler.queue_error(1) is None:
            request = backlog.popleft()
            if request.finish_reason is None:
                self.queue([request])

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
