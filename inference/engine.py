"""Generate and score with a live model: continuous batching in the caller's thread.

    prompts ─▶ Request ─▶ Scheduler ─▶ Step ─▶ model ─▶ tokens ─▶ Completion
                             ▲                             │
                             └────────── Loop ◀────────────┘

The model may be in training: between two optimizer steps the engine borrows it and hands it back as
it was. What it keeps for the next call (pages, graphs, cached prefixes) stays within `memory`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from ..runtime import unwrap_model
from .execution.gc_control import defer_full_gc
from .execution.memory_budget import SPARE, Memory
from .executor import Executor
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .requests.active_requests import ActiveRequests, Inbox
from .requests.outputs import Completion, Score, StreamEvent
from .requests.request import Request
from .requests.request_builder import Params, PromptSpec, RequestBuilder, broadcast_params, seconds
from .requests.request_group import RequestGroup, longest_first
from .requests.scoring import ScoreJob, pairs, rolling_windows, scored
from .requests.tokenization import Prompt, TokenizerAdapter, identity
from .scheduling.loop import Loop
from .session import ModelSession
from .settings import checked_dtype, checked_seed, positive, settle

_TWINS = 1 << 16
"""Prompts whose repetitions are counted; an engine that is never idle forgets them in time."""


class Engine:
    """Generation and scoring on a causal language model of Transformers.

    `max_num_seqs` and `max_num_batched_tokens` are the dial between throughput and latency, and may be
    turned while requests run: the README of this room has the curve they trace.

    Between calls weights may change and adapters be switched: what others computed is forgotten. A
    write of few elements through `.data` may escape it (a sample is compared): write them under
    `torch.no_grad()`, which is seen, or call `release()` after it.

    memory: bytes, a share of free memory, or "spare": what training leaves.
    page_size: tokens to a page of the cache; 256 where flash-attn may want it, else 16.
    max_num_seqs: requests in one step; more raise throughput and the time between tokens.
    max_num_batched_tokens: tokens in one step; more finish prompts sooner and hold up the rest.
    max_model_len: longest sequence; by default what the model's positions allow.
    max_waiting: requests that may queue; None: any number.
    keep_memory: keep pages, graphs and cached prefixes between calls; False gives all of it back.
    dtype: compute in this dtype although the weights are wider; by default as autocast says.
    seed: of requests that name none.
    cuda_graphs: on a GPU, launch decode steps as graphs; False saves their memory and capture.
    debug: check every step's bookkeeping.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        memory: Memory = SPARE,
        page_size: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
        keep_memory: bool = True,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        cuda_graphs: bool = True,
        debug: bool = False,
    ):
        self._model = unwrap_model(model)
        settings = settle(
            self._model,
            memory=memory,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            cuda_graphs=cuda_graphs,
            debug=debug,
        )
        self._tongue = TokenizerAdapter(self._model, tokenizer)
        self._intake = RequestBuilder(self._tongue, checked_seed(seed), settings.max_model_len)
        self._max_waiting = None if max_waiting is None else positive("max_waiting", max_waiting)
        self.stats = Stats()
        self.trace = RequestTrace()
        self._tenancy = ModelSession(
            self._model,
            settings,
            self.stats,
            self.trace,
            lambda request: self._under_way.of(request).text_ends(request),
            lambda: bool(self._under_way),
            keep_memory=keep_memory,
            dtype=checked_dtype(dtype),
        )
        self._under_way = ActiveRequests()
        self._news = Inbox()
        """Of submitted requests, until `step` tells it."""
        self._twins: Counter[int] = Counter()
        """How often each prompt was submitted since none was under way."""
        self._stepped = False
        """Whether a step was run since the weights were last looked at."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt; one Completion each, in the order given.

        Python's full collections of garbage wait until it returns.

        params: for all prompts, or one for each.
        priority: lower runs first; for all, or one for each.
        deadline: seconds after which requests return what they have; for all, or one for each.
        """
        asked = broadcast_params(prompts, params, priority, deadline)
        bar = tqdm(total=len(asked), disable=not progress, unit="req")
        with bar, defer_full_gc(), self._session():
            self._begin()
            groups = self._take_in(asked)
            done = self._finish_all(groups, bar.update)
            return [done[group.id] for group in groups]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> Iterator[StreamEvent]:
        """Yield tokens and text as they are made; `StreamEvent.request_id` is the prompt's index.

        The model is borrowed only while a step runs: between two events it is the trainer's. Other
        calls may come in between, other streams too; each gets what is its own.
        """
        asked = broadcast_params(prompts, params, priority, deadline)
        inbox = Inbox()
        with self._session():
            self._begin()
            groups = self._take_in(asked, streaming=True)
            self._under_way.add(groups, inbox)
        queue, index = longest_first(groups), {group.id: i for i, group in enumerate(groups)}
        left = len(groups)
        try:
            while left:
                if not inbox:
                    with self._session(light=True):
                        self._feed(queue)
                        self._advance()
                while inbox:
                    event = inbox.popleft()
                    left -= event.completion is not None
                    yield replace(event, request_id=index[event.request_id])
        finally:
            for group in groups:
                self._abort(group)
                self._under_way.forget(group)
            self._tenancy.rest()

    def add_request(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queue a request for `step`; its number names it in events and for `abort`.

        A prompt submitted again while requests are under way is answered anew, unless it names a
        seed; once all are done, the draws begin again.
        """
        if not self._under_way or len(self._twins) > _TWINS:
            self._twins.clear()
        under_way = self._machine is not None and self._loop.busy
        # Of requests submitted one after the other, the first has looked at the weights.
        with self._session(light=under_way, look=self._stepped):
            asked = [(prompt, params, priority, deadline)]
            (group,) = self._take_in(asked, streaming=True, twins=self._twins)
            if not group.done and (why := self._no_room(len(group.requests))) is not None:
                self._twins[identity(group.requests[0].prompt)] -= 1  # it may well come again
                group.refuse(why)
            self._under_way.add([group], self._news)
            for request in group.requests:
                self._enqueue(request)
        return group.id

    def step(self) -> list[StreamEvent]:
        """Run one step of the submitted requests; say what is new.

        Should it raise, all requests under way end with an error, and the next call says so.
        """
        if self._machine is not None and self._loop.busy:
            with self._session(light=True):
                self._advance()
        news = list(self._news)
        self._news.clear()
        return news

    def abort(self, request: int) -> None:
        """End a submitted request; its completion has what it made so far."""
        group = self._under_way.get(request)
        if group is not None:
            self._under_way.tell(self._abort(group))
            self._tenancy.rest()

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
        longest = self._tenancy.settings.max_model_len
        jobs, join = rolling_windows(self._tongue, texts, max_length, longest)
        return join(self._score(jobs, None))

    @property
    def max_num_seqs(self) -> int:
        """Requests in one step; may be lowered and raised again while requests run."""
        return self._tenancy.dial("max_num_seqs")

    @max_num_seqs.setter
    def max_num_seqs(self, value: int) -> None:
        most = self._tenancy.settings.max_num_seqs
        if (value := positive("max_num_seqs", value)) > most:
            raise ValueError(f"max_num_seqs is {value}; this engine was made for 1 to {most}")
        self._tenancy.turn("max_num_seqs", value)

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in one step; may be changed while requests run."""
        return self._tenancy.dial("max_num_batched_tokens")

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, value: int) -> None:
        self._tenancy.turn("max_num_batched_tokens", positive("max_num_batched_tokens", value))

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes: what comes next is computed anew."""
        self._tenancy.forget()

    def release(self) -> None:
        """Give back pages, graphs and copies of weights; the next call builds them anew.

        Requests under way end with an error.
        """
        self._refuse_all("the engine was released while the request was under way")
        self._tenancy.release()

    # --- below: how the calls above share one loop ---

    @property
    def _machine(self) -> Executor | None:
        return self._tenancy.machine

    @property
    def _loop(self) -> Loop:
        return self._tenancy.loop

    @contextmanager
    def _session(self, light: bool = False, look: bool = False) -> Iterator[None]:
        """Have the model; requests end with the machine that a fault takes away."""
        try:
            with self._tenancy.session(light, look) as drained:
                self._under_way.tell(drained)
                self._stepped = self._stepped and light and not look
                yield
        except BaseException as error:
            if self._machine is None:
                self._refuse_all(f"the engine stopped on an error ({type(error).__name__})")
            raise

    def _begin(self) -> None:
        """Begin a call: unless other requests are under way, the trace is about this one."""
        if not self._under_way:
            self.trace.clear()

    def _take_in(
        self, asked: list[PromptSpec], streaming: bool = False, twins: Counter[int] | None = None
    ) -> list[RequestGroup]:
        now, room = self._loop.clock(), self._tenancy.room
        return self._intake.generation_requests(asked, now, room, streaming, twins)

    def _finish_all(
        self, groups: list[RequestGroup], tell: Callable[[int], Any] = lambda finished: None
    ) -> dict[int, Completion]:
        """Run until all groups are done."""
        inbox, queue = Inbox(), longest_first(groups)
        self._under_way.add(groups, inbox)
        done: dict[int, Completion] = {}
        while True:
            ended = {e.request_id: e.completion for e in inbox if e.completion is not None}
            inbox.clear()
            if ended:
                done |= ended
                tell(len(ended))
            if len(done) == len(groups):
                return done
            self._feed(queue)
            self._advance()

    def _no_room(self, count: int) -> str | None:
        """Why so many requests more cannot wait, if they cannot."""
        most, waiting = self._max_waiting, self._loop.scheduler.waiting
        if most is None or waiting + count <= most:
            return None
        if count > most:
            return f"n is {count}, and max_waiting is {most}: lower n or raise max_waiting"
        return f"the queue is full ({waiting} waiting, at most {most}): step() first"

    def _enqueue(self, request: Request) -> None:
        self.stats.note_queued(request, self._loop.clock())
        self._loop.scheduler.add(request)

    def _feed(self, queue: deque[Request]) -> None:
        """Queue requests as far as the queue goes."""
        while queue and self._no_room(1) is None:
            request = queue.popleft()
            if request.finish_reason is None:
                self._enqueue(request)

    def _advance(self) -> None:
        """Run a step of all that is under way."""
        self._stepped = True
        self._under_way.tell(self._loop.step())
        if self._tenancy.settings.debug:
            self._loop.scheduler.check()

    def _abort(self, group: RequestGroup) -> list[Request]:
        """End what is open of a group."""
        still = [request for request in group.requests if request.finish_reason is None]
        for request in still:
            self._loop.abort(request)
        return still

    def _refuse_all(self, error: str) -> None:
        """End all that is under way with an error."""
        for request in self._under_way.fail_all(error):
            self.stats.note_finish(request, perf_counter())
            self.trace.add(request.id, "finished", why="error", tokens=len(request.output))

    def _score(self, jobs: list[ScoreJob], deadline: float | None) -> list[Score]:
        left = seconds(deadline)
        with defer_full_gc(), self._session():
            self._begin()
            groups = self._intake.scoring_requests(
                jobs, self._loop.clock() + left, self._tenancy.room
            )
            self._finish_all(groups)
            return [scored(group) for group in groups]
