"""`RequestQueue`: run HTTP requests in the engine's thread; `TimeShare` limits them in training.

    HTTP thread      put ─▶ waiting ─┐                          ┌─▶ events of each request
    engine's thread         run: add_request ─ step ─ step ─ step ─ …

`run` admits requests and runs steps until none is left. A server of its own calls it whenever a
request arrives; beside a training, the training thread calls it between two optimizer steps, within
the limits of a `TimeShare`. Whatever happens, each request gets one final event or an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any

from ..engine import Engine
from ..requests.outputs import StreamEvent
from ..requests.sampling_params import SamplingParams
from .openai_api import ApiError

log = logging.getLogger(__name__)

Result = StreamEvent | ApiError
_MIN_STEPS = 4
_MAX_SLACK = 2.0


@dataclass(eq=False, slots=True)
class ServedRequest:
    """One prompt of a call: what the engine runs, and the queue of its events."""

    prompt: Any
    params: SamplingParams
    stream: bool
    expires: float
    """By `time.monotonic()`."""
    events: asyncio.Queue[Result] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    """The client is gone, or has waited for too long."""
    is_admitted: bool = False
    step: int | None = None
    """The training step of the weights that it ran with."""


class TimeShare:
    """The time of a training that requests may take: earned by its share, then spent.

    Time is saved up to `max_pause` seconds. Requests start once their expected time is saved, so
    that their share of the training's time stays below `max_share` from the start on; if they take
    longer than expected, the excess is a debt that later time pays.
    """

    def __init__(
        self,
        max_share: float,
        max_pause: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Take the limits; arguments: as in `serve`."""
        self.max_share, self.max_pause = max_share, max_pause
        self.seconds = 0.0
        """Time that requests have taken so far, without the current pause."""
        self._clock = clock
        self._account: tuple[float, float, bool] | None = None
        """Seconds saved at a time, that time, and whether requests run since then."""

    def start(self) -> None:
        """Count the time of the training from the first call on."""
        self._account = self._account or (0.0, self._clock(), False)

    def saved(self) -> float:
        """Return the seconds that requests may take now; negative after they took too long."""
        if self._account is None or self.max_share == 1:
            return self.max_pause
        saved, since, is_paused = self._account
        seconds = self._clock() - since
        earned = min(self.max_pause, saved + self.max_share * seconds)
        return earned - seconds if is_paused else earned

    def wait(self, seconds: float) -> float:
        """Return the time until requests that take this long may run."""
        return max(0.0, (seconds - self.saved()) / self.max_share)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Charge the time of this block."""
        start = self._clock()
        self._account = self.saved(), start, True
        try:
            yield
        finally:
            end = self._clock()
            self.seconds += end - start
            self._account = self.saved(), end, False


class RequestQueue:
    """The requests of all connections, and the engine that runs them."""

    def __init__(self, engine: Engine, time_share: TimeShare | None = None):
        self.time_share = time_share
        self.step: int | None = None
        """The training step of the weights that requests run with."""
        self.is_closed = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """That of the HTTP thread, while it runs."""
        self._engine = engine
        self._lock = Lock()
        self._waiting: deque[ServedRequest] = deque()
        self._running: dict[int, ServedRequest] = {}
        self._faulty: set[int] = set()
        """Requests that an exception of the engine has ended."""
        self._step_times: deque[float] = deque(maxlen=100)
        self.step_seconds = 0.0
        """Median time of the newest steps; 0 before there are a few."""
        self._slack = 1.0
        """How much longer than expected windows took lately: prompts, batches, other threads."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def put(self, requests: list[ServedRequest]) -> None:
        """Queue requests; ApiError 503 if the server is closing or the training must not wait."""
        with self._lock:
            if self.is_closed:
                raise ApiError(503, "the server is shutting down", 1)
            self._check_pause(requests)
            self._waiting.extend(requests)

    def _check_pause(self, requests: list[ServedRequest]) -> None:
        if self.time_share is None:
            return
        expected = max(self.expected_seconds(request) for request in requests)
        wait, limit = self.time_share.wait(expected), self.time_share.max_pause
        if expected > limit:
            raise ApiError(
                503,
                f"this request would stop the training for about {expected:.1f} s, and max_pause "
                f"is {limit:g}: lower max_tokens",
                max(wait, 1),
            )
        if time.monotonic() + wait > min(request.expires for request in requests):
            message = f"requests have used up their share of the training time for {wait:.0f} s"
            raise ApiError(503, message, wait)

    def expected_seconds(self, request: ServedRequest) -> float:
        """Estimate the time of a request from the time of a step; 0 before that is known."""
        num_prompt_tokens = len(request.prompt["input_ids"])
        num_prefills = -(-num_prompt_tokens // self._engine.max_num_batched_tokens)
        num_steps = request.params.max_tokens + num_prefills
        return num_steps * self.step_seconds * self._slack

    def is_due(self) -> bool:
        """Return whether the time of the request that has waited longest is saved up."""
        assert self.time_share is not None
        self.time_share.start()
        first = self._first_waiting()
        return first is not None and self.time_share.wait(self.expected_seconds(first)) == 0

    def _first_waiting(self) -> ServedRequest | None:
        if not self._waiting:
            return None
        with self._lock:
            return next((each for each in self._waiting if not each.is_cancelled), None)

    def run(self, step: int | None = None, last: bool = False) -> None:
        """Run requests until none is left; called by the thread that may use the model.

        Args:
            step: the training step of the weights.
            last: the training has ended: refuse later requests, and ignore the time share.
        """
        self.step = step
        self.is_closed |= last
        share = None if last else self.time_share
        if share is not None and not self.step_seconds and self._first_waiting() is not None:
            self._measure_steps()
        start = time.monotonic()

        def seconds_left() -> float:
            if share is None:
                return float("inf")
            return min(share.saved(), share.max_pause - (time.monotonic() - start))

        expected = self._admit_waiting(seconds_left())
        while self._running:
            self._run_step()
            more = self._admit_waiting(seconds_left())
            expected = max(expected, more and time.monotonic() - start + more)
            self.abort_cancelled()
        if expected:
            ratio = self._slack * (time.monotonic() - start) / expected
            self._slack = min(max(ratio, 1 + 0.9 * (self._slack - 1)), _MAX_SLACK)

    def close(self) -> None:
        """Refuse new requests and those that did not finish."""
        with self._lock:
            self.is_closed = True
            refused = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            self._running.clear()  # left over if an interrupt ended a step
        error = ApiError(503, "the server is shutting down", 1)
        self._deliver([(request, error) for request in refused])

    def _admit_waiting(self, seconds: float) -> float:
        """Admit the requests expected to take at most this time; return the longest one's."""
        if not self._waiting:
            return 0.0
        with self._lock:
            waiting = [request for request in self._waiting if not request.is_cancelled]
            admitted = [r for r in waiting if self.expected_seconds(r) <= seconds]
            self._waiting = deque(r for r in waiting if r not in admitted)
        for request in admitted:
            self._admit(request)
        return max(map(self.expected_seconds, admitted), default=0.0)

    def _admit(self, request: ServedRequest) -> None:
        seconds = request.expires - time.monotonic()
        if seconds <= 0:
            error = ApiError(503, "the request has waited for too long", 1)
            return self._deliver([(request, error)])
        request.is_admitted, request.step = True, self.step
        try:
            request_id = self._engine.add_request(request.prompt, request.params, deadline=seconds)
        except ValueError as error:
            self._deliver([(request, ApiError(400, str(error)))])
        except Exception as error:
            log.exception("a request could not be added to the engine")
            self._deliver([(request, ApiError(500, f"engine: {type(error).__name__}"))])
        else:
            self._running[request_id] = request

    def abort_cancelled(self) -> None:
        """Free the requests whose clients no longer wait."""
        for request_id, request in [*self._running.items()]:
            if request.is_cancelled:
                del self._running[request_id]
                self._engine.abort(request_id)

    def _measure_steps(self) -> None:
        """Generate a few tokens for nobody: requests of an unknown time could take any share."""
        params = SamplingParams(max_tokens=_MIN_STEPS + 1, ignore_eos=True)
        request_id = self._engine.add_request([0], params)
        while not self.step_seconds:
            self._run_step()
        self._engine.abort(request_id)

    def _run_step(self) -> None:
        start = time.monotonic()
        try:
            events = self._engine.step()
        except Exception:
            log.exception("a step of the engine failed")
            self._faulty |= self._running.keys()
            events = self._engine.step()  # the failed requests' final events
        self._step_times.append(time.monotonic() - start)
        if len(self._step_times) >= _MIN_STEPS:
            # A mean would count compilation and warm-up: later requests would seem long.
            self.step_seconds = median(self._step_times)
        results: list[tuple[ServedRequest, Result]] = []
        for event in events:
            request = self._running.get(event.request_id)
            if request is None:  # aborted
                continue
            if event.completion is not None:
                del self._running[event.request_id]
                results.append((request, self._final(event)))
            elif request.stream:
                results.append((request, event))
        self._deliver(results)

    def _final(self, event: StreamEvent) -> Result:
        assert event.completion is not None
        is_faulty = event.request_id in self._faulty
        self._faulty.discard(event.request_id)
        if event.completion.error is None:
            return event
        return ApiError(500 if is_faulty else 400, event.completion.error)

    def _deliver(self, results: list[tuple[ServedRequest, Result]]) -> None:
        """Hand events to the HTTP thread, all of a step at once."""
        if not results or self.loop is None:
            return

        def put_all() -> None:
            for request, result in results:
                request.events.put_nowait(result)

        try:
            self.loop.call_soon_threadsafe(put_all)
        except RuntimeError:  # the loop is closed, and with it every connection
            log.debug("answers without a connection were dropped")
