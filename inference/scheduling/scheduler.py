"""Which requests run how many tokens in the next step: pure integers, no tensors.

    waiting (heap) ──admit──▶ running (oldest first) ──finish──▶
                   ◀─preempt──

One walk over the running requests gives each what it needs, as far as the step's tokens go; what
is left of them admits waiting ones. Nothing tells a prefill from a decode: a request just needs
more or fewer tokens. Order is (priority, arrival) throughout, so the first request is never
preempted and always gets its pages: something finishes, whatever the load.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from ...attention.paging import STRIDE, PageAllocator, PageCopy, PrefixHit
from ..metrics.request_trace import RequestTrace
from ..requests.request import Request

_LOOK_AHEAD = 32
"""Requests passed over in a step because their prefix is just being computed."""


@dataclass(slots=True)
class Plan:
    """What the next step does."""

    requests: list[Request] = field(default_factory=list)
    """Each with `planned` set."""
    copies: list[PageCopy] = field(default_factory=list)
    """Pages to copy before it."""
    prefilled: list[Request] = field(default_factory=list)
    """Those whose prompt it completes, once it is committed."""


class Scheduler:
    """Plan steps over one page allocator."""

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        rows_per_step: int = 1024,
        admit_at_once: int = 1,
        admit: Callable[[Request], None] = lambda request: None,
        trace: RequestTrace | None = None,
    ):
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows_per_step = rows_per_step
        self.admit_at_once = admit_at_once
        """So many of those that wait join those that run together, or a quarter of the slots."""
        self.scope = ""
        """Which weights the cached prefixes belong to."""
        self.table = np.zeros((max_num_seqs, -(-max_model_len // pages.page_size)), dtype=np.int32)
        """Pages of each slot, in order."""
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self._on_admit = admit
        self._trace = trace or RequestTrace()
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._stale = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._deadlines: list[tuple[float, int, Request]] = []
        self._orders = 0

    @property
    def waiting(self) -> int:
        """Requests not running."""
        return len(self._waiting) - self._stale

    def add(self, request: Request) -> None:
        """Queue a request; it must be able to fit the cache alone."""
        size = self.pages.page_size
        assert request.limit >= 2 and -(-(request.limit - 1) // size) <= self.pages.num_pages
        request.order = self._orders = self._orders + 1
        heappush(self._waiting, (_rank(request), request))
        if request.deadline != float("inf"):
            heappush(self._deadlines, (request.deadline, request.order, request))
        self._trace.add(request.id, "queued", prompt=len(request.prompt), limit=request.limit)

    def overdue(self, now: float) -> list[Request]:
        """Take out the requests whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heappop(self._deadlines)[-1]
            if request.finish_reason is None:
                late.append(request)
        return late

    def plan(self) -> Plan:
        """Choose what the next step runs."""
        plan = Plan()
        tokens, rows, size = self.max_num_batched_tokens, self.rows_per_step, self.pages.page_size
        before, place = self.preemptions, 0
        while place < len(self.running) and tokens > 0:
            request = self.running[place]
            computed = request.computed
            need = min(request.length, request.limit - 1) - computed
            # Those after it shall get a token each, too.
            run = min(need, max(1, tokens - len(self.running) + place + 1))
            if request.score_from is not None:
                run = self._scorable(request, run, rows)
                rows -= len(request.scored_rows(computed, computed + run))
            if computed + run > request.held * size and not self._grow(request, computed + run):
                break
            if run:
                request.planned = run
                plan.requests.append(request)
                tokens -= run
            place += 1
        if self.preemptions == before:
            self._admit(plan, tokens, rows)
        return plan

    def commit(self, plan: Plan) -> None:
        """Count a plan as done: its step is on the device, or about to be."""
        for request in plan.requests:
            start, request.computed = request.computed, request.computed + request.planned
            if start < len(request.prompt):
                self._offer(request, start)
                if request.computed >= len(request.prompt):
                    plan.prefilled.append(request)
            if request.computed == request.length:
                request.length += 1

    def note_prefilled(self, requests: list[Request]) -> None:
        """Let the trace know that a step is done which completed these requests' prompts."""
        for request in requests:
            if request.slot >= 0:  # else it was ended, or sent back, while the step ran
                self._trace.add(request.id, "prefilled")

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Take a request out, wherever it is."""
        assert request.finish_reason is None, f"request {request.id} ends twice"
        request.finish_reason, request.error = reason, error
        self._trace.add(request.id, "finished", why=reason, tokens=len(request.output))
        self._forget_deadlines()
        if request.slot >= 0:
            self._release(request)
        elif request.order:  # without one, it was never queued
            self._stale += 1
            self._sweep()

    def shrink(self) -> None:
        """Make steps smaller after one did not fit: fewer tokens, then fewer requests at a time."""
        if self.max_num_batched_tokens > 64:
            self.max_num_batched_tokens //= 2
        elif len(self.running) > 1:
            self.max_num_seqs = len(self.running) // 2
            for request in self.running[self.max_num_seqs :]:
                self._preempt(request, by=request, why="a step did not fit the memory")
        else:
            raise MemoryError("one request with 64 tokens a step does not fit the memory")

    def restart(self, why: str) -> None:
        """Send every running request back to the queue, to be computed anew."""
        for request in list(self.running):
            self._preempt(request, by=request, why=why)

    def check(self) -> None:
        """Assert that pages, slots and counters agree."""
        self.pages.check()
        assert sorted(self._slots + [r.slot for r in self.running]) == list(range(len(self.table)))
        assert {r.id for r in self.running} == set(self.pages.owners), "a page has no request"
        assert self.running == sorted(self.running, key=_rank), "running requests are out of order"
        for r in self.running:
            held = self.pages.pages(r.id)
            assert r.held == len(held), f"request {r.id} miscounts its pages"
            assert r.computed <= len(held) * self.pages.page_size, f"request {r.id} lacks pages"
            assert self.table[r.slot, : len(held)].tolist() == held, f"request {r.id}: wrong table"

    def _scorable(self, request: Request, run: int, rows: int) -> int:
        """How many of `run` tokens a request may take, with so many scored rows left."""
        scored = request.scored_rows(request.computed, request.computed + run)
        return run if len(scored) <= rows else max(scored.start + rows - request.computed, 0)

    def _grow(self, request: Request, length: int) -> bool:
        """Give a running request pages for its first `length` tokens, preempting if need be."""
        size = self.pages.page_size
        while True:
            missing = -(-length // size) - request.held
            if missing <= 0:
                return True
            if missing <= self.pages.available:
                self._append(request, missing)
                return True
            victim = self.running[-1]
            self._preempt(victim, by=request)
            if victim is request:
                return False

    def _admit(self, plan: Plan, tokens: int, rows: int) -> None:
        """Start waiting requests while slots, pages and tokens last."""
        brewing = {self._next_stride(r, r.computed) for r in plan.requests if r.planned > 1}
        free = self.max_num_seqs - len(self.running)
        at_once = min(self.admit_at_once, max(1, self.max_num_seqs // 4))
        if self.running and free < min(self.waiting, at_once):
            return
        waits: list[tuple[tuple[int, int], Request]] = []
        while tokens > 0 and len(self.running) < self.max_num_seqs and len(waits) < _LOOK_AHEAD:
            self._sweep()
            if not self._waiting:
                break
            request = self._waiting[0][1]
            hit = self.pages.attach_prefix(
                request.id, request.tokens(0, request.reusable).tolist(), self.scope
            )
            if self._is_brewing(request, hit, brewing):
                self.pages.free(request.id)
                waits.append(heappop(self._waiting))
                continue
            if not self._start(request, hit, plan):
                break
            heappop(self._waiting)
            run = min(request.need, tokens)
            if request.score_from is not None:
                run = self._scorable(request, run, rows)
                rows -= len(request.scored_rows(request.computed, request.computed + run))
            if run:
                request.planned = run
                plan.requests.append(request)
                tokens -= run
                brewing.add(self._next_stride(request, request.computed))
        for entry in waits:
            heappush(self._waiting, entry)

    def _is_brewing(
        self, request: Request, hit: PrefixHit, brewing: set[tuple[int, bytes]]
    ) -> bool:
        """Whether another request computes, in this very step, what would be a hit in the next."""
        more = hit.tokens + STRIDE <= request.reusable
        return more and self._next_stride(request, hit.tokens) in brewing

    def _start(self, request: Request, hit: PrefixHit, plan: Plan) -> bool:
        """Give a waiting request pages and a slot, if there are enough."""
        held = self.pages.pages(request.id)
        wanted = min(request.length, request.limit - 1)
        missing = -(-wanted // self.pages.page_size) - len(held)
        spare = self.pages.num_pages // 100 if self.running else 0
        if missing + spare > self.pages.available:
            self.pages.free(request.id)
            return False
        if hit.copy is not None:
            plan.copies.append(hit.copy)
        request.computed = hit.tokens
        request.slot, request.held = self._slots.pop(), len(held)
        self.table[request.slot, : len(held)] = held
        self._append(request, missing)
        insort(self.running, request, key=_rank)
        self.prefix_hits += hit.tokens
        self.prompt_tokens += request.length
        what = "resumed" if request.preempted else "admitted"
        self._trace.add(request.id, what, hit=hit.tokens)
        self._on_admit(request)
        return True

    def _preempt(self, victim: Request, by: Request, why: str = "no page is left") -> None:
        """Send a request back to the queue; what it cached is computed again."""
        self.preemptions += 1
        victim.preempted += 1
        self._trace.add(victim.id, "preempted", by=by.id, why=why)
        self._release(victim)
        victim.computed = 0
        heappush(self._waiting, (_rank(victim), victim))

    def _release(self, request: Request) -> None:
        self.pages.free(request.id)
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot, request.held = -1, 0

    def _offer(self, request: Request, start: int) -> None:
        """Let later requests share what the step just planned adds to the prompt's prefix."""
        stop = min(request.computed, len(request.prompt))
        if stop // STRIDE > start // STRIDE:
            self.pages.register(request.id, request.prompt[:stop].tolist(), self.scope)

    def _append(self, request: Request, count: int) -> None:
        fresh = self.pages.allocate(request.id, count)
        self.table[request.slot, request.held : request.held + count] = fresh
        request.held += count

    def _next_stride(self, request: Request, start: int) -> tuple[int, bytes]:
        start -= start % STRIDE
        return start, request.prompt[start : start + STRIDE].tobytes()

    def _forget_deadlines(self) -> None:
        """Drop the deadlines of requests that ended in time, once they are the larger part."""
        if len(self._deadlines) > 2 * (len(self.running) + self.waiting):
            self._deadlines = [d for d in self._deadlines if d[-1].finish_reason is None]
            heapify(self._deadlines)

    def _sweep(self) -> None:
        """Drop finished requests from the head of the queue."""
        while self._waiting and self._waiting[0][1].finish_reason is not None:
            heappop(self._waiting)
            self._stale -= 1


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.order
