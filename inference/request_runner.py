"""`RequestRunner`: queue the requests of all calls of an engine, run shared steps, publish results.

groups ─▶ queue ─▶ step, step, … ─▶ detokenize, stop ─▶ events of the call that submitted them

Blocking calls of several threads share steps. One of them is the driver: it queues the requests of
all calls and runs steps until it has completions to return or to report. The others wait; one of
them becomes the next driver.

    thread 1   generate ─▶ step ─ step ─ step ─▶ done
    thread 2        generate ·······················─▶ step ─ step ─▶ done
    thread 3          generate ··········─▶ done

If a thread waits for the model, the driver returns it after the step, so that new calls can start.
It also returns the model before progress is reported: a callback may raise, call the engine or wait
for other threads. `generate` tokenizes and queues a few prompts at a time, while the device runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, get_ident
from time import perf_counter
from typing import Any

from .live_model.model_lock import ModelLock
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.output_processor import EventQueue, OutputProcessor, RequestGroup
from .requests.outputs import Completion
from .requests.request import Request
from .scheduling.cache_checker import check_scheduler
from .scheduling.loop import StepLoop
from .session import ModelSession, WeightsCheck

MIN_QUEUED = 64
"""Minimum number of requests to queue before a step, and more until their prompts fill it: with
cached prefixes, each may have only a few tokens to run."""

BuildGroups = Callable[[float], Iterable[RequestGroup]]
"""Returns the groups of a call that started at the given time; called once the engine is built."""


class Call:
    """A blocking call, with its active requests and its completions so far."""

    def __init__(self, on_finished: Callable[[int], Any] | None, paced: bool):
        """Create a call of this thread; on_finished, paced: as in `run_to_completion`."""
        self.thread = get_ident()
        self.paced = paced
        self.queued_at: float | None = None
        """Time at which its first request could be queued."""
        self.is_started = self.is_over = self.is_reporting = False
        self.error: Exception | None = None
        """An exception that ends this call alone."""
        self.completions: dict[int, Completion] = {}
        self._on_finished = on_finished
        self._num_reported = 0

    @property
    def has_news(self) -> bool:
        """Whether its thread can return, has to start it again, or has progress to report."""
        return self.is_over or not self.is_started or self.num_unreported > 0

    @property
    def num_unreported(self) -> int:
        return len(self.completions) - self._num_reported if self._on_finished else 0

    def start(self, build: BuildGroups, outputs: OutputProcessor) -> None:
        """Start, or start again after the requests were lost."""
        self.events, self.active = EventQueue(), dict[int, RequestGroup]()
        self.backlog, self.has_more = self._requests(build, outputs), True
        self.completions = {}
        self.is_started = self.is_new = True

    def collect(self) -> bool:
        """Take the new completions from the events; return whether there are any."""
        new = {e.request_id: e.completion for e in self.events if e.completion is not None}
        self.events.clear()
        for group_id in new:
            del self.active[group_id]
        self.completions |= new
        return bool(new)

    def report(self) -> None:
        """Pass the number of new completions to the caller's function."""
        if self._on_finished and (new := self.num_unreported) > 0:
            self._num_reported += new
            self._on_finished(new)

    def _requests(self, build: BuildGroups, outputs: OutputProcessor) -> Iterator[Request]:
        """Yield the requests of all groups; a group is active as soon as it is taken."""
        assert self.queued_at is not None
        for group in build(self.queued_at):
            self.active[group.id] = group
            outputs.add([group], self.events)
            yield from group.requests


class RequestRunner:
    """Queue requests, run steps and publish results.

    Every method but `run_to_completion` needs the model's lock.
    """

    def __init__(
        self,
        session: ModelSession,
        outputs: OutputProcessor,
        stats: Stats,
        trace: RequestTrace,
        lock: ModelLock,
    ):
        self._session = session
        self._outputs = outputs
        self._stats = stats
        self._trace = trace
        self._lock = lock
        self._calls: list[Call] = []
        """Blocking calls that are not over."""
        self._sharing_key: Hashable = None
        """`ModelSession.sharing_key` of these calls."""
        self._driver: Call | None = None
        """The call whose thread runs the steps of all calls."""
        self._changed = Condition()
        """Notified when calls end, have completions or need a driver."""
        self._entrance = ModelLock()
        """Held by a thread that waits for these calls to end; others wait, unless needed."""

    @property
    def loop(self) -> StepLoop:
        return self._session.loop

    @contextmanager
    def borrow_model(self, weights_check: WeightsCheck = "full") -> Iterator[None]:
        """Borrow the model; if an exception drops the executor, all requests end with an error."""
        try:
            with self._session.borrow(weights_check) as updated:
                self._process_outputs(updated)
                yield
        except BaseException as error:
            if self._session.executor is None:
                self.fail_all(f"the engine stopped on an error ({type(error).__name__})")
            raise

    @contextmanager
    def lock_model(self) -> Iterator[None]:
        """Hold the model's lock; wait first for calls whose steps this thread cannot share.

        A thread that already has the lock or a call does not wait, since others may wait for it.
        """
        with ExitStack() as stack:
            if self._lock.is_mine or get_ident() in [call.thread for call in [*self._calls]]:
                stack.enter_context(self._lock)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: not self._entrance.depth or self._all_report())
                if not self._lock_to_share(stack):
                    with self._entrance:
                        while not self._lock_to_share(stack):
                            with self._changed:
                                self._changed.wait_for(lambda: not self._calls)
                    self._notify()
            yield

    def _all_report(self) -> bool:
        """Whether all calls are in their callers' functions, which may wait for a new call."""
        return bool(self._calls) and all(call.is_reporting for call in self._calls)

    def _lock_to_share(self, stack: ExitStack) -> bool:
        """Enter the model's lock into `stack` if this thread may run steps for all calls."""
        with self._lock:
            if may_share := not self._calls or self._shares_steps():
                stack.enter_context(self._lock)
        return may_share

    def _shares_steps(self) -> bool:
        key = self._session.sharing_key()
        return key is not None and key == self._sharing_key

    def start_trace(self) -> None:
        """Drop the trace of earlier calls, unless their requests are still active."""
        if not self._outputs.has_requests():
            self._trace.clear()

    def run_to_completion(
        self,
        check_call: Callable[[], BuildGroups],
        on_finished: Callable[[int], Any] | None = None,
        paced: bool = False,
    ) -> dict[int, Completion]:
        """Run a call; return its completions by group id.

        Steps run in this thread or in that of another call. If another call fails and its requests
        are lost, this call starts again.

        Args:
            check_call: checks the call, and returns the function that builds its groups.
            on_finished: called in this thread with the number of new completions, while the model
                is in the trainer's state. If it raises, only this call ends.
            paced: build only a few groups before every step, because tokenizing takes time. If a
                prompt is invalid, the requests before it are aborted.
        """
        call = Call(on_finished, paced)
        try:
            while not call.is_over:
                with self.lock_model():
                    if not call.is_started:
                        self._start(call, check_call)
                    if self._driver in (None, call) or self._lock.depth > 1:
                        self._drive(call)
                self._wait(call)
        finally:
            if call.is_started and not call.is_over:
                self._leave(call)
        if call.error is not None:
            raise call.error
        return call.completions

    def _start(self, call: Call, check_call: Callable[[], BuildGroups]) -> None:
        self.start_trace()
        call.start(check_call(), self._outputs)
        if not self._calls:
            self._sharing_key = self._session.sharing_key()
        self._calls.append(call)
        self._session.num_calls += 1

    def _drive(self, call: Call) -> None:
        """Run steps for all calls until this call has news or a thread waits for the model."""
        may_share = self._lock.depth == 1 and self._sharing_key is not None
        has_new_calls = any(each.is_new for each in self._calls)
        self._driver = call
        with self.borrow_model("full" if has_new_calls else "counters"):
            self._serve_calls()
            while not call.has_news:
                self.run_step()
                if may_share and self._lock.has_waiters:
                    return
                self._serve_calls()
        self._driver = None
        self._notify()

    def _serve_calls(self) -> None:
        """Queue the requests of all calls, collect completions, and end the calls that are done."""
        for call in list(self._calls):
            call.is_new = False
            call.queued_at = self.loop.clock() if call.queued_at is None else call.queued_at
            try:
                call.has_more = self.queue_backlog(call.backlog, call.queued_at, call.paced)
            except Exception as error:
                self._abort_call(call)
                call.error = error
            if call.collect():
                self._notify()
            if not call.has_more and not call.active:
                call.is_over = True
                self._remove(call)

    def _wait(self, call: Call) -> None:
        """Report progress, and wait while another thread runs the steps."""
        self._report(call)
        while call.is_started and not call.is_over and self._driver not in (None, call):
            with self._changed:
                self._changed.wait_for(lambda: call.has_news or self._driver in (None, call))
            self._report(call)

    def _report(self, call: Call) -> None:
        if call.num_unreported:
            call.is_reporting = True
            self._notify()
            try:
                call.report()
            finally:
                call.is_reporting = False

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _leave(self, call: Call) -> None:
        """End a call whose caller no longer waits for it."""
        with self._lock:
            if call in self._calls:
                self._abort_call(call)
                self._remove(call)
                self._session.release_if_idle()

    def _abort_call(self, call: Call) -> None:
        for group in call.active.values():
            self.abort(group)
            self._outputs.remove(group)
        call.active.clear()
        call.events.clear()
        call.has_more = False

    def _remove(self, call: Call) -> None:
        self._calls.remove(call)
        self._session.num_calls -= 1
        if self._driver is call:
            self._driver = None
        self._notify()

    def run_step(self) -> None:
        """Run one step of all active requests, and publish its results."""
        self._process_outputs(self.loop.step())
        if self._session.settings.debug:
            check_scheduler(self.loop.scheduler)

    def queue(self, request: Request, since: float) -> None:
        """Queue a request for the scheduler; `since`: when it was sent."""
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
        """End all active requests with an error; blocking calls of other threads start again."""
        for call in list(self._calls):
            call.is_started = False
            self._remove(call)
        for request in self._outputs.fail_all(error):
            self._stats.record_finish(request, perf_counter())
            num_tokens = len(request.output_token_ids)
            self._trace.add(request.id, "finished", why="error", tokens=num_tokens)

    def _process_outputs(self, updated: list[Request]) -> None:
        """Detokenize new tokens, end requests at stop strings, and queue events."""
        stopped = self._outputs.detokenize(updated)
        self.loop.apply_stop_strings(updated, stopped)
        self._outputs.publish(updated)
