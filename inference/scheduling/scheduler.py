"""Continuous-batching scheduler: how many tokens of which requests the next step runs.

    waiting (heap) ──admit──▶ running (in order) ──finish──▶
                   ◀─preempt──

One pass over the running requests gives each the tokens it needs, within the token budget of a
step; the rest of the budget admits waiting requests. Prefill and decode are not distinguished: a
request needs more or fewer tokens. Requests are ordered by arrival; one level of priority counts as
1,024 arrivals, so one with a larger `priority` waits long but not forever. The order never changes,
so the first request is never preempted, always gets its pages, and every load makes progress. Pure
integers, no tensors.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from ...attention.paging import STRIDE, PageAllocator, PageCopy, PrefixHit
from ..metrics.request_trace import RequestTrace
from ..requests.request import Request

_MAX_DEFERRED = 32
"""Requests skipped per step because another one is computing their prefix."""
_MIN_BATCHED_TOKENS = 64
"""`reduce_load` lowers the tokens per step to this before it lowers the number of requests."""
_MIN_CHUNK = 16
"""Minimum prompt tokens of a step beside its decodes."""
ARRIVALS_PER_PRIORITY = 1024
"""How many later requests with the next lower priority value run before a request."""


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of the next step."""

    requests: list[Request] = field(default_factory=list)
    """Each with `num_scheduled` set."""
    copies: list[PageCopy] = field(default_factory=list)
    """Pages to copy before the step."""
    admitted: list[Request] = field(default_factory=list)
    """Requests that got a row for this step, also after a preemption."""
    prefilled: list[Request] = field(default_factory=list)
    """Requests whose prompt the step completes; filled in when the plan is committed."""


class Scheduler:
    """Plan steps over one page allocator."""

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int | None = None,
        max_scored_positions: int = 1024,
        has_states: bool = False,
        trace: RequestTrace | None = None,
    ):
        """Start with an empty queue.

        max_waiting: maximum length of the queue; None: unlimited. Callers check `queue_error`.
        max_scored_positions: maximum positions scored per step; each needs a row of logits.
        has_states: whether the model keeps states besides the pages: no prefix can be reused, since
            its state is lost, and a step that failed midway cannot be repeated.
        """
        self.pages = pages
        self.max_waiting = max_waiting
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_positions = max_scored_positions
        self.has_states = has_states
        self.cache_salt = ""
        """Version of the weights; prefixes are shared only within one version."""
        max_pages = -(-max_model_len // pages.page_size)
        self.page_table = np.zeros((max_num_seqs, max_pages), dtype=np.int32)
        """Pages of each row, in order."""
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self.num_admitted_tokens = 0
        self._trace = trace or RequestTrace()
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_finished_waiting = 0
        """Requests that finished while they waited and are still in the heap."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that do not run."""
        return len(self._waiting) - self._num_finished_waiting

    def queue_error(self, count: int) -> str | None:
        """Return why `count` more requests cannot be queued; None if they can."""
        limit, num_waiting = self.max_waiting, self.num_waiting
        if limit is None or num_waiting + count <= limit:
            return None
        if count > limit:
            return f"n is {count}, and max_waiting is {limit}: lower n or raise max_waiting"
        return f"the queue is full ({num_waiting} waiting, at most {limit}): step() first"

    def add(self, request: Request) -> None:
        """Queue a request; the cache must be large enough for it alone."""
        page_size = self.pages.page_size
        assert request.max_len >= 2
        assert -(-(request.max_len - 1) // page_size) <= self.pages.num_pages
        request.arrival = self._num_arrivals = self._num_arrivals + 1
        heappush(self._waiting, (sort_key(request), request))
        if request.deadline != float("inf"):
            heappush(self._deadlines, (request.deadline, request.arrival, request))
        self._trace.add(request.id, "queued", prompt=request.prompt_len, limit=request.max_len)

    def pop_overdue(self, now: float) -> list[Request]:
        """Return the unfinished requests whose deadline has passed, each once."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[-1]
            if request.finish_reason is None:
                overdue.append(request)
        return overdue

    def plan(self, max_tokens: int | None = None) -> SchedulerOutput:
        """Choose the tokens of the next step.

        max_tokens: a lower limit than `max_num_batched_tokens`, for this step.
        """
        plan = SchedulerOutput()
        tokens_left, scored_left = self.max_num_batched_tokens, self.max_scored_positions
        if max_tokens is not None:
            tokens_left = min(tokens_left, max(max_tokens, len(self.running) + _MIN_CHUNK))
        page_size, running, scheduled = self.pages.page_size, self.running, plan.requests
        preemptions_before = self.num_preemptions
        for index, request in enumerate(running):  # preemption removes requests after this one
            if tokens_left <= 0:
                break
            start = request.num_computed
            num_tokens = min(request.num_tokens, request.max_len - 1) - start
            if num_tokens > 1:  # leave one token for each request after this one
                num_tokens = min(num_tokens, max(1, tokens_left - len(running) + index + 1))
            if request.score_from is not None:
                num_tokens = self._limit_scored(request, num_tokens, scored_left)
                scored_left -= len(request.scored_positions(start, start + num_tokens))
            end = start + num_tokens
            if end > request.num_pages * page_size and not self._ensure_pages(request, end):
                break
            if num_tokens:
                request.num_scheduled = num_tokens
                scheduled.append(request)
                tokens_left -= num_tokens
        if self.num_preemptions == preemptions_before:
            self._admit_waiting(plan, tokens_left, scored_left)
        return plan

    def commit(self, plan: SchedulerOutput) -> None:
        """Advance the counters of a plan whose step was launched."""
        for request in plan.requests:
            start = request.num_computed
            end = request.num_computed = start + request.num_scheduled - len(request.draft)
            if start < request.prompt_len:
                self._register_prefix(request, start)
                if end >= request.prompt_len:
                    plan.prefilled.append(request)
            if end == request.num_tokens:
                request.num_tokens = end + 1

    def on_prefilled(self, requests: list[Request]) -> None:
        """Trace that the step which completed the prompts of these requests is done."""
        for request in requests:
            if request.row >= 0:  # otherwise it finished or was preempted during the step
                self._trace.add(request.id, "prefilled")

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, running or waiting."""
        assert request.finish_reason is None, f"request {request.id} ends twice"
        request.finish_reason, request.error = reason, error
        self._trace.add(request.id, "finished", why=reason, tokens=len(request.output_token_ids))
        self._prune_deadlines()
        if request.row >= 0:
            self._release(request)
        elif request.arrival:  # otherwise it was never queued
            self._num_finished_waiting += 1
            self._prune_waiting()

    def reduce_load(self, num_tokens: int) -> None:
        """Shrink steps after one ran out of memory: fewer tokens first, then fewer requests.

        num_tokens: tokens of the step that ran out of memory.
        """
        if self.max_num_batched_tokens > _MIN_BATCHED_TOKENS:
            smaller = min(self.max_num_batched_tokens, num_tokens) // 2
            self.max_num_batched_tokens = max(smaller, _MIN_BATCHED_TOKENS)
        elif len(self.running) > 1:
            self.max_num_seqs = len(self.running) // 2
            for request in self.running[self.max_num_seqs :]:
                self._preempt(request, by=request, why="a step did not fit the memory")
        else:
            raise MemoryError(
                f"one request with {_MIN_BATCHED_TOKENS} tokens a step does not fit the memory"
            )
        if self.has_states:
            self.preempt_all("a step failed midway")

    def preempt_all(self, why: str) -> None:
        """Send every running request back to the queue, to be recomputed."""
        for request in list(self.running):
            self._preempt(request, by=request, why=why)

    def append_pages(self, request: Request, count: int) -> None:
        """Give a running request free pages."""
        start, new = request.num_pages, self.pages.allocate(request.id, count)
        self.page_table[request.row, start : start + count] = new
        request.num_pages += count

    def _limit_scored(self, request: Request, num_tokens: int, scored_left: int) -> int:
        """How many of `num_tokens` a request may run if `scored_left` positions may be scored."""
        start = request.num_computed
        scored = request.scored_positions(start, start + num_tokens)
        if len(scored) <= scored_left:
            return num_tokens
        return max(scored.start + scored_left - start, 0)

    def _ensure_pages(self, request: Request, num_tokens: int) -> bool:
        """Give a running request pages for its first `num_tokens`, preempting others if needed.

        False if the request itself had to be preempted.
        """
        while True:
            missing = -(-num_tokens // self.pages.page_size) - request.num_pages
            if missing <= 0:
                return True
            if missing <= self.pages.available:
                self.append_pages(request, missing)
                return True
            victim = self.running[-1]
            self._preempt(victim, by=request)
            if victim is request:
                return False

    def _admit_waiting(self, plan: SchedulerOutput, tokens_left: int, scored_left: int) -> None:
        """Admit waiting requests while rows, pages and tokens last."""
        if not self._waiting:
            return
        prefixes_in_progress = {
            self._next_prefix_key(r, r.num_computed) for r in plan.requests if r.num_scheduled > 1
        }
        deferred: list[tuple[tuple[int, int], Request]] = []
        while (
            tokens_left > 0
            and len(self.running) < self.max_num_seqs
            and self._free_rows
            and len(deferred) < _MAX_DEFERRED
        ):
            self._prune_waiting()
            if not self._waiting:
                break
            request = self._waiting[0][1]
            prefix = request.token_ids(0, self._max_prefix_hit(request))
            hit = self.pages.attach_prefix(request.id, prefix, self.cache_salt)
            if self._prefix_in_progress(request, hit, prefixes_in_progress):
                self.pages.free(request.id)
                deferred.append(heappop(self._waiting))
                continue
            if not self._try_admit(request, hit, plan):
                break
            heappop(self._waiting)
            start = request.num_computed
            num_tokens = min(request.num_remaining, tokens_left)
            if request.score_from is not None:
                num_tokens = self._limit_scored(request, num_tokens, scored_left)
                scored_left -= len(request.scored_positions(start, start + num_tokens))
            if num_tokens:
                request.num_scheduled = num_tokens
                plan.requests.append(request)
                tokens_left -= num_tokens
                prefixes_in_progress.add(self._next_prefix_key(request, start))
        for entry in deferred:
            heappush(self._waiting, entry)

    def _prefix_in_progress(
        self, request: Request, hit: PrefixHit, prefixes_in_progress: set[tuple[int, bytes]]
    ) -> bool:
        """Whether this step computes, for another request, what the next step could reuse."""
        may_hit_more = hit.tokens + STRIDE <= self._max_prefix_hit(request)
        return may_hit_more and self._next_prefix_key(request, hit.tokens) in prefixes_in_progress

    def _max_prefix_hit(self, request: Request) -> int:
        return 0 if self.has_states else request.max_prefix_hit

    def _try_admit(self, request: Request, hit: PrefixHit, plan: SchedulerOutput) -> bool:
        """Give a waiting request pages and a row, if enough pages are free."""
        pages = self.pages.pages(request.id)
        num_tokens = min(request.num_tokens, request.max_len - 1)
        missing = -(-num_tokens // self.pages.page_size) - len(pages)
        # 1 % stays free, so that running requests can grow without a preemption.
        reserve = self.pages.num_pages // 100 if self.running else 0
        if missing + reserve > self.pages.available:
            self.pages.free(request.id)
            return False
        if hit.copy is not None:
            plan.copies.append(hit.copy)
        request.num_computed = hit.tokens
        request.row, request.num_pages = self._free_rows.pop(), len(pages)
        self.page_table[request.row, : len(pages)] = pages
        self.append_pages(request, missing)
        insort(self.running, request, key=sort_key)
        self.num_prefix_hit_tokens += hit.tokens
        self.num_admitted_tokens += request.num_tokens
        event = "resumed" if request.num_preemptions else "admitted"
        self._trace.add(request.id, event, hit=hit.tokens)
        plan.admitted.append(request)
        return True

    def _preempt(self, victim: Request, by: Request, why: str = "no page is left") -> None:
        """Send a request back to the queue; what is not a cached prefix by then is recomputed."""
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self._trace.add(victim.id, "preempted", by=by.id, why=why)
        self._release(victim)
        victim.num_computed = 0
        heappush(self._waiting, (sort_key(victim), victim))

    def _release(self, request: Request) -> None:
        self.pages.free(request.id)
        self.running.remove(request)
        self._free_rows.append(request.row)
        request.row, request.num_pages = -1, 0

    def _register_prefix(self, request: Request, start: int) -> None:
        """Register the part of the prompt that this step computes, for later requests."""
        stop = min(request.num_computed, request.prompt_len)
        if stop // STRIDE > start // STRIDE and not self.has_states:
            self.pages.register(request.id, request.prompt_token_ids[:stop], self.cache_salt)

    def _next_prefix_key(self, request: Request, start: int) -> tuple[int, bytes]:
        start -= start % STRIDE
        return start, request.prompt_token_ids[start : start + STRIDE].tobytes()

    def _prune_deadlines(self) -> None:
        """Drop the deadlines of finished requests once they are the majority."""
        if len(self._deadlines) > 2 * (len(self.running) + self.num_waiting):
            self._deadlines = [d for d in self._deadlines if d[-1].finish_reason is None]
            heapify(self._deadlines)

    def _prune_waiting(self) -> None:
        """Drop finished requests from the head of the queue."""
        while self._waiting and self._waiting[0][1].finish_reason is not None:
            heappop(self._waiting)
            self._num_finished_waiting -= 1


def sort_key(request: Request) -> tuple[int, int]:
    """Return the position of a request in the order: its arrival, moved by its priority."""
    return request.arrival + ARRIVALS_PER_PRIORITY * request.priority, request.arrival
