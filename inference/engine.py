"""Generate and score with a live model: continuous batching in the caller's thread.

    prompts ─▶ Request ─▶ Scheduler ─▶ Step ─▶ model ─▶ tokens ─▶ Completion
                             ▲                             │
                             └────────── Loop ◀────────────┘

The model may be in training: between two optimizer steps the engine borrows it and hands it back as
it was. What it keeps for the next call (pages, graphs, cached prefixes) stays within `memory`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from .borrow import unwrap
from .completion import Completion, Event, Score
from .garbage import full_collections_later
from .group import Group, longest_first
from .intake import Asked, Intake, Params, each_asked
from .loop import Loop
from .machine import Machine
from .memory import SPARE, Memory
from .prompts import Prompt, Tongue
from .request import Request
from .request_trace import Trace
from .scoring import Job, pairs, rolling_windows, scored
from .settings import checked_dtype, checked_seed, positive, settle
from .stats import Stats
from .tenancy import Tenancy
from .under_way import UnderWay


class Engine:
    """Generation and scoring on a causal language model of Transformers.

    `max_running` and `tokens_per_step` are the dial between throughput and latency, and may be
    turned while requests run. What they trade, with a model of 1.2 B parameters on an H200:

        running          16     48     96    192    384
        ms a token      1.2    1.5    1.6    2.4    3.9
        k tokens/s       13     32     60     80     98

    Args:
        memory: bytes, a share of free memory, or "spare": what training leaves.
        page_size: tokens to a page of the cache; 256 where flash-attn may want it, else 16.
        max_running: requests in one step; more raise throughput and the time between tokens.
        tokens_per_step: tokens in one step; more finish prompts sooner and hold up the rest.
        max_length: longest sequence; by default what the model's positions allow.
        max_waiting: requests that may queue; None: any number.
        keep: keep pages, graphs and cached prefixes between calls; False gives all of it back.
        dtype: compute in this dtype although the weights are wider; by default as autocast says.
        seed: of requests that name none.
        graphs: on a GPU, launch decode steps as graphs; False saves their memory and capture.
        debug: check every step's bookkeeping.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        memory: Memory = SPARE,
        page_size: int | None = None,
        max_running: int | None = None,
        tokens_per_step: int | None = None,
        max_length: int | None = None,
        max_waiting: int | None = None,
        keep: bool = True,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        graphs: bool = True,
        debug: bool = False,
    ):
        self._model = unwrap(model)
        settings = settle(
            self._model,
            memory=memory,
            page_size=page_size,
            max_running=max_running,
            tokens_per_step=tokens_per_step,
            max_length=max_length,
            graphs=graphs,
            debug=debug,
        )
        self._tongue = Tongue(self._model, tokenizer)
        self._intake = Intake(self._tongue, checked_seed(seed), settings.max_length)
        self._max_waiting = None if max_waiting is None else positive("max_waiting", max_waiting)
        self.stats = Stats()
        self.trace = Trace()
        self._tenancy = Tenancy(
            self._model,
            settings,
            self.stats,
            self.trace,
            lambda request: self._under_way.of(request).text_ends(request),
            lambda: bool(self._under_way),
            keep=keep,
            dtype=checked_dtype(dtype),
        )
        self._under_way = UnderWay()
        self._news: list[Event] = []
        self._stepped = False
        """Whether a step was run since the weights were last looked at."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt; one Completion each, in the order given.

        Python's full collections of garbage wait until it returns.

        Args:
            params: for all prompts, or one for each.
            priority: lower runs first; for all, or one for each.
            deadline: seconds after which unfinished requests return what they have.
        """
        asked = each_asked(prompts, params, priority)
        bar = tqdm(total=len(asked), disable=not progress, unit="req")
        with bar, full_collections_later(), self._session():
            self._begin()
            groups = self._take_in(asked, deadline)
            bar.update(sum(group.done for group in groups))
            self._finish_all(groups, longest_first(groups), bar.update)
            return [group.result() for group in groups]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | None = None,
    ) -> Iterator[Event]:
        """Yield tokens and text as they are made; `Event.request` is the prompt's index.

        The model is borrowed only while a step runs: between two events it is the trainer's.
        """
        asked = each_asked(prompts, params, priority)
        with self._session():
            self._begin()
            groups = self._take_in(asked, deadline, streaming=True)
            queue = longest_first(groups)
        index = {group.id: i for i, group in enumerate(groups)}
        try:
            yield from (Event(i, [], "", g.result()) for i, g in enumerate(groups) if g.done)
            while self._feed(queue) or not all(g.done for g in groups):
                with self._session(light=True):
                    events = self._advance()
                self._news += [e for e in events if e.request not in index]
                mine = (e for e in events if e.request in index)
                yield from (replace(e, request=index[e.request]) for e in mine)
        finally:
            for group in groups:
                self._cancel(group)
            self._tenancy.rest()

    def submit(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queue a request for `step`; its number names it in events and for `cancel`."""
        under_way = self._machine is not None and self._loop.busy
        # Of requests submitted one after the other, the first has looked at the weights.
        with self._session(light=under_way, look=self._stepped):
            (group,) = self._take_in([(prompt, params, priority)], deadline, streaming=True)
            full = (
                self._max_waiting is not None and self._loop.scheduler.waiting >= self._max_waiting
            )
            if full and not group.done:
                self._under_way.forget(group)
                group.refuse(f"the queue is full ({self._max_waiting} waiting): step() first")
            if group.done:
                self._news.append(Event(group.id, [], "", group.result()))
            for request in group.requests:
                self._enqueue(request)
        return group.id

    def step(self) -> list[Event]:
        """Run one step of the submitted requests; say what is new."""
        news, self._news = self._news, []
        if self._machine is None or not self._loop.busy:
            return news
        with self._session(light=True):
            return news + self._advance()

    def cancel(self, request: int) -> None:
        """End a submitted request; its completion has what it made so far."""
        group = self._under_way.get(request)
        if group is None:
            return
        self._cancel(group)
        self._tenancy.rest()
        self._news.append(Event(group.id, [], "", group.result()))

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Any],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Log-likelihood of continuations, each given its context.

        `continuations[i]` is one continuation of `contexts[i]`, giving one Score, or a list of
        them, giving a list; a context is computed once for all of them.
        """
        jobs, shape = pairs(self._tongue, contexts, continuations)
        return shape(self._score(jobs, deadline))

    def score_rolling(
        self, texts: Sequence[Prompt], *, max_length: int | None = None
    ) -> list[Score]:
        """Log-likelihood of whole texts, in windows where they are longer than the model allows.

        Each token is predicted once, from the tokens before it in its window; the first one from
        the beginning-of-text token.
        """
        longest = self._tenancy.settings.max_length
        length = min(max_length or longest, longest)
        jobs, join = rolling_windows(self._tongue, texts, length)
        return join(self._score(jobs, None))

    @property
    def max_running(self) -> int:
        """Requests in one step; may be lowered and raised again while requests run."""
        return self._dial("max_running")

    @max_running.setter
    def max_running(self, value: int) -> None:
        most = self._tenancy.settings.max_running
        if not 1 <= value <= most:
            raise ValueError(f"max_running is {value}; this engine was made for 1 to {most}")
        self._turn("max_running", value)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step; may be changed while requests run."""
        return self._dial("tokens_per_step")

    @tokens_per_step.setter
    def tokens_per_step(self, value: int) -> None:
        self._turn("tokens_per_step", positive("tokens_per_step", value))

    def release(self) -> None:
        """Give back pages, graphs and copies of weights; the next call builds them anew."""
        self._tenancy.release()

    # --- below: how the calls above share one loop ---

    @property
    def _machine(self) -> Machine | None:
        return self._tenancy.machine

    @property
    def _loop(self) -> Loop:
        return self._tenancy.loop

    @contextmanager
    def _session(self, light: bool = False, look: bool = False) -> Iterator[None]:
        """Have the model; after a fault that took the machine, no running call survives."""
        try:
            with self._tenancy.session(light, look) as drained:
                self._news += self._under_way.events(drained)
                self._stepped = self._stepped and light and not look
                yield
        except BaseException:
            if self._machine is None:
                self._under_way.refuse_all("the engine stopped on an error")
                self._news.clear()
            raise

    def _begin(self) -> None:
        """Begin a call: unless other requests are under way, the trace is about this one."""
        if not self._loop.busy:
            self.trace.clear()

    def _take_in(
        self, asked: list[Asked], deadline: float | None, streaming: bool = False
    ) -> list[Group]:
        until = self._until(deadline)
        groups = self._intake.to_generate(asked, until, self._tenancy.room, streaming)
        self._under_way.add(groups)
        return groups

    def _until(self, deadline: float | None) -> float:
        return float("inf") if deadline is None else self._loop.clock() + deadline

    def _finish_all(
        self,
        groups: list[Group],
        queue: deque[Request],
        tell: Callable[[int], Any] = lambda finished: None,
    ) -> None:
        """Run until all groups are done; keep others' events for `step`."""
        ours = {group.id for group in groups if not group.done}
        while self._feed(queue) or ours:
            for event in self._advance():
                if event.request not in ours:
                    self._news.append(event)
                elif event.completion is not None:
                    ours.remove(event.request)
                    tell(1)

    def _enqueue(self, request: Request) -> None:
        self.stats.note_queued(request, self._loop.clock())
        self._loop.scheduler.add(request)

    def _feed(self, queue: deque[Request]) -> bool:
        """Queue requests as far as the queue goes; say whether some are left."""
        while queue and (
            self._max_waiting is None or self._loop.scheduler.waiting < self._max_waiting
        ):
            self._enqueue(queue.popleft())
        return bool(queue)

    def _advance(self) -> list[Event]:
        """Run a step; say what is new."""
        self._stepped = True
        events = self._under_way.events(self._loop.step())
        if self._tenancy.settings.debug:
            self._loop.scheduler.check()
        return events

    def _cancel(self, group: Group) -> None:
        for request in group.requests:
            if request.finish_reason is None:
                self._loop.cancel(request)
        self._under_way.forget(group)

    def _score(self, jobs: list[Job], deadline: float | None) -> list[Score]:
        with full_collections_later(), self._session():
            self._begin()
            groups = self._intake.to_score(jobs, self._until(deadline), self._tenancy.room)
            self._under_way.add(groups)
            self._finish_all(groups, longest_first(groups))
            return [scored(group) for group in groups]

    def _dial(self, name: str) -> int:
        place = self._tenancy.settings if self._machine is None else self._loop.scheduler
        return getattr(place, name)

    def _turn(self, name: str, value: int) -> None:
        if self._machine is None:
            self._tenancy.settings = replace(self._tenancy.settings, **{name: value})
        else:
            setattr(self._loop.scheduler, name, value)
