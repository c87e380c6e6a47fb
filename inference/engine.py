"""The engine: generate and score with a live model, by continuous batching in the caller's thread.

    prompts ─▶ Request ─▶ Scheduler ─▶ Step ─▶ model ─▶ tokens ─▶ OutputProcessor ─▶ Completion
                             ▲                             │
                             └────────── Loop ◀────────────┘

The model may be in training: between two optimizer steps the engine borrows it and returns it
unchanged. Pages, CUDA graphs and cached prefixes are kept for the next call, within `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from tqdm import tqdm

from ..runtime import unwrap_model
from .batch_invariant import is_batch_invariant
from .execution.gc_control import defer_full_gc
from .execution.memory_budget import SPARE, Memory
from .live_model.model_lock import exclusive, model_lock
from .live_model.replica import replica_ranks
from .metrics.request_trace import RequestTrace
from .metrics.stats import Stats
from .pretrained import load_pretrained
from .request_runner import BuildGroups, RequestRunner
from .requests import scoring
from .requests.draws import Draws, own_draws
from .requests.output_processor import EventQueue, OutputProcessor, RequestGroup
from .requests.outputs import Completion, Score, StreamEvent
from .requests.prompt_spec import Params, PromptSpec, broadcast_params, deadline_seconds
from .requests.request import Request
from .requests.request_builder import EncodedPrompt, RequestBuilder
from .requests.tokenizer_adapter import Prompt, TokenizerAdapter
from .scheduling.loop import StepLoop
from .scheduling.speculation import DraftSource
from .session import Executor, ModelSession
from .settings import check_dtype, check_model, check_positive, check_seed, resolve_settings


class Engine:
    """Generation and scoring on a causal language model of Transformers.

    Every prompt gets one completion. If one request fails, its completion has the error and the
    others continue; only a wrong call raises.

    Calls from several threads share steps: 16 threads with one prompt each take about as long as
    one call with 16 prompts. A call under another autocast or in `batch_invariant` waits until
    the others are done. Do not train the model in another thread during a call, because its layers
    then use the engine's attention.

    Weights, adapters, hooks, forwards and attributes may change between calls and before
    `add_request`; prefixes that were cached before the change are dropped. Update weights under
    `torch.no_grad()`, which is always noticed. Writes through `.data` are noticed only by
    `generate`, `score`, `stream` and a request to an idle engine, and only if they change one of
    the sampled values; call `reset_prefix_cache()` after them. inference/README.md lists all
    changes that are not noticed.

    Args:
        model: a causal LM of Transformers, in training or not, which DDP, FSDP2, PEFT or
            torch.compile may wrap; or the name of a checkpoint: a folder, the folder of a LoRA
            adapter, or a name on the hub. A checkpoint is loaded in its own dtype or in `dtype`,
            onto the GPU if there is one. Code in a checkpoint is never run.
        tokenizer: for prompts and completions as text; default: that of the named checkpoint. May
            be a name if `model` is one.
        memory: bytes, a fraction of the free memory, or "spare": the memory that training does not
            use.
        page_size: tokens per page of the KV cache, a multiple of 16; default: 256 on a GPU
            (for flash-attn 2), 16 on a CPU.
        max_num_seqs: maximum requests per step; default: 512 on a GPU, 64 on a CPU. A higher value
            raises throughput and inter-token latency.
        max_num_batched_tokens: maximum tokens per step; a higher value finishes prompts sooner and
            delays running requests. Default: 2048 on a CPU, 16384 on a GPU; while any request is
            decoding, captured steps are capped at 2048 or four times `max_num_seqs`.
        max_model_len: maximum length of a sequence; default: that of the model.
        max_waiting: maximum length of the queue; None: unlimited.
        target_itl: target inter-token latency in seconds; prefills are chunked to meet it, and the
            first call captures the CUDA graphs of short requests. None: maximum throughput.
        keep_memory: keep pages, CUDA graphs and cached prefixes between calls; False frees them.
        dtype: dtype to compute in, if narrower than the weights; default: that of autocast.
        seed: seed of requests without their own. Each call draws fresh random numbers; a repeated
            run draws the same ones.
        cuda_graphs: on a GPU, run steps as CUDA graphs; False saves their memory and capture time.
        speculate: verify several drafted tokens in a step where that is faster; completions are the
            same. Drafts: "ngram", the request's own text; "history", the prompt's last completion.
        kv_dtype: "int8" or "fp8" keeps keys and values in 8 bits: 1.9 times the tokens in bf16.
        debug: check the pages and counters of all requests at every step.
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
        target_itl: float | None = None,
        keep_memory: bool = True,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        cuda_graphs: bool = True,
        speculate: DraftSource | None = None,
        kv_dtype: Literal["int8", "fp8"] | None = None,
        debug: bool = False,
    ):
        if isinstance(model, str | PathLike):
            model, tokenizer = load_pretrained(model, tokenizer, check_dtype(dtype))
        self._model = check_model(unwrap_model(model))
        settings = resolve_settings(
            self._model, memory=memory, page_size=page_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
            max_waiting=max_waiting, target_itl=target_itl, keep_memory=keep_memory, dtype=dtype,
            cuda_graphs=cuda_graphs, speculate=speculate, kv_dtype=kv_dtype, debug=debug,
        )  # fmt: skip
        self._tokenizer = TokenizerAdapter(self._model, tokenizer)
        longest, reason = settings.max_model_len, settings.max_model_len_reason
        self._builder = RequestBuilder(self._tokenizer, check_seed(seed), longest, reason)
        self.stats = Stats()
        self.trace = RequestTrace()
        self._outputs = OutputProcessor()
        self._session = ModelSession(
            self._model, settings, self.stats, self.trace, self._outputs.has_requests
        )
        self._lock = model_lock(self._model)
        self._runner = RequestRunner(
            self._session, self._outputs, self.stats, self.trace, self._lock
        )
        self._events = EventQueue()
        """Events of requests from `add_request` that `step` has not returned yet."""

    def generate(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        progress: bool | Callable[[int], Any] = False,
        _draws: Draws | None = None,
    ) -> list[Completion]:
        """Complete every prompt; return one Completion for each, in the order of the prompts.

        Prompts are tokenized while others run, except in the first call. A prompt of a wrong type
        raises and ends the call. Full garbage collection is deferred until this returns.

        Args:
            prompts: texts, token ids, chats, or a tokenizer's output with its attention_mask.
            params: sampling parameters, one for all prompts or one for each.
            priority: lower values run first; one for all prompts or one for each.
            deadline: seconds after which requests return the tokens they have; one for all prompts
                or one for each.
            progress: True shows a bar; a function is called with the number of new completions. It
                may call the engine, or wait for calls of other threads under the same autocast; if
                it raises, the call ends.
        """
        specs = broadcast_params(prompts, params, priority, deadline)
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ValueError(f"progress is {progress!r}; pass True, False or a function")
        bar = tqdm(total=len(specs), disable=progress is not True, unit="req")
        update = bar.update if progress is True else progress or None
        numbered = [] if _draws is None else [_draws]

        def check_call() -> BuildGroups:
            encoded = self._encode(specs)
            if self._executor is None:  # building it takes seconds: check all prompts before
                encoded = [*encoded]
            if not numbered:  # once: a call that starts again draws the same numbers
                numbered.append(own_draws(self._model))
            return lambda queued_at: self._build_requests(encoded, numbered[0], queued_at)

        with bar, defer_full_gc():
            completions = self._runner.run_to_completion(check_call, update, paced=True)
            return [completions[group_id] for group_id in sorted(completions)]

    @exclusive
    def stream(
        self,
        prompts: Sequence[Prompt] | Mapping[str, Any],
        params: Params | Sequence[Params] = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> Iterator[StreamEvent]:
        """Yield tokens and text as they are generated; `request_id` is the prompt's index.

        The model is borrowed only while a step runs; between two events it is in the trainer's
        state, and other calls and streams may run. `prompts`, `params`, `priority` and `deadline`
        are those of `generate`.
        """
        encoded = [*self._encode(broadcast_params(prompts, params, priority, deadline))]
        return self._stream(encoded, own_draws(self._model))

    def _stream(self, encoded: list[EncodedPrompt], draws: Draws) -> Iterator[StreamEvent]:
        events = EventQueue()
        with self._runner.lock_model(), self._runner.borrow_model():
            self._runner.start_trace()
            start = self._loop.clock()
            groups = [*self._build_requests(encoded, draws, start, streaming=True)]
            self._outputs.add(groups, events)
        index_of = {prompt.group_id: prompt.prompt_index for prompt in encoded}
        backlog = (request for group in groups for request in group.requests)
        num_open = len(groups)
        try:
            while num_open:
                if not events:
                    self._step_stream(events, backlog, start)
                while events:
                    event = events.popleft()
                    num_open -= event.completion is not None
                    yield replace(event, request_id=index_of[event.request_id])
        finally:
            with self._lock:
                for group in groups:
                    self._runner.abort(group)
                    self._outputs.remove(group)
                self._session.release_if_idle()

    def add_request(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queue a request for `step`; the returned id names it in events and for `abort`.

        The arguments are those of `generate`, for one `prompt`: `params`, `priority`, `deadline`.
        """
        specs = broadcast_params([prompt], params, priority, deadline)
        with self._runner.lock_model():
            encoded = [*self._encode(specs)]
            is_busy = self._executor is not None and self._loop.busy
            # A busy engine checks the model at its next step.
            is_current = is_busy and self._session.is_current()
            with nullcontext() if is_current else self._runner.borrow_model():
                now, draws = self._loop.clock(), own_draws(self._model)
                (group,) = self._build_requests(encoded, draws, now, streaming=True)
                error = self._loop.scheduler.queue_error(len(group.requests))
                if not group.done and error is not None:
                    group.fail(error)
                self._outputs.add([group], self._events)
                for request in group.requests:
                    self._runner.queue(request, now)
                self._session.has_new_requests |= is_current
        return group.id

    def step(self) -> list[StreamEvent]:
        """Run one step; return the new events of requests from `add_request`.

        If it raises, all active requests end with an error; the next call returns their events.
        """
        with self._runner.lock_model():
            if self._executor is not None and self._loop.busy:
                with self._runner.borrow_model("counters"):
                    self._runner.run_step()
            events = list(self._events)
            self._events.clear()
        return events

    @exclusive
    def abort(self, request_id: int) -> None:
        """End the request `request_id`; its completion has the tokens generated so far."""
        group = self._outputs.get(request_id)
        if group is not None:
            self._outputs.publish(self._runner.abort(group))
            self._session.release_if_idle()

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Any],
        *,
        deadline: float | None = None,
    ) -> list[Any]:
        """Return the log-likelihood of each continuation given its context.

        `continuations[i]` is one continuation of `contexts[i]`, which gives a Score, or a list of
        continuations, which gives a list and computes the context once. After `deadline` seconds,
        the scores of unfinished requests have an error.
        """
        jobs, regroup = scoring.flatten_pairs(self._tokenizer, contexts, continuations)
        return regroup(self._score(jobs, deadline))

    def score_rolling(
        self, texts: Sequence[Prompt], *, max_length: int | None = None
    ) -> list[Score]:
        """Return the log-likelihood of whole `texts`, in windows of at most `max_length` tokens.

        Each token is predicted once, from the tokens before it in its window; the first token from
        the beginning-of-text token. By default, windows have the maximum length of the model.
        """
        max_model_len = self._session.settings.max_model_len
        jobs, join = scoring.rolling_windows(self._tokenizer, texts, max_length, max_model_len)
        return join(self._score(jobs, None))

    @property
    def model(self) -> Any:
        """The model that the engine generates with."""
        return self._model

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a call now would run in `batch_invariant`."""
        return is_batch_invariant()

    @property
    def max_num_seqs(self) -> int:
        """Maximum requests per step; may be lowered and raised again while requests run."""
        return self._session.get_limit("max_num_seqs")

    @max_num_seqs.setter
    def max_num_seqs(self, value: int) -> None:
        limit = self._session.settings.max_num_seqs
        if (value := check_positive("max_num_seqs", value)) > limit:
            raise ValueError(f"max_num_seqs is {value}; this engine was built for 1 to {limit}")
        self._session.set_limit("max_num_seqs", value)

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens per step; may be set while requests run, and applies to all steps then."""
        return self._session.get_limit("max_num_batched_tokens")

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, value: int) -> None:
        value = check_positive("max_num_batched_tokens", value)
        self._session.set_limit("max_num_batched_tokens", value)

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes, so that later requests compute their whole prompts."""
        self._session.reset_prefix_cache()

    @exclusive
    def release(self) -> None:
        """Free pages, CUDA graphs and copies of weights; the next call builds them again.

        Requests of `add_request` and `stream` end with an error; blocking calls in other threads
        start again.
        """
        self._runner.fail_all("the engine was released while the request was active")
        self._session.release()

    @property
    def _executor(self) -> Executor | None:
        return self._session.executor

    @property
    def _loop(self) -> StepLoop:
        return self._session.loop

    def _step_stream(self, events: EventQueue, backlog: Iterator[Request], start: float) -> None:
        """Run one step, unless the step of another thread has queued events meanwhile."""
        with self._runner.lock_model():
            if not events:
                with self._runner.borrow_model("counters"):
                    self._runner.queue_backlog(backlog, start)
                    self._runner.run_step()

    def _encode(self, specs: Sequence[PromptSpec]) -> Iterator[EncodedPrompt]:
        self._check_deadline(min((spec.seconds for spec in specs), default=float("inf")))
        return self._builder.encode(specs)

    def _check_deadline(self, seconds: float) -> None:
        """Refuse a deadline under tensor parallelism, where the clocks of the ranks differ."""
        if seconds < float("inf") and len(replica_ranks(self._model)) > 1:
            raise ValueError(
                "deadline= cannot be used with tensor parallelism: its ranks would end a request "
                "at different steps; lower max_tokens instead"
            )

    def _build_requests(
        self, encoded: Iterable[EncodedPrompt], draws: Draws, since: float, streaming: bool = False
    ) -> Iterator[RequestGroup]:
        shared = draws, since, self._session.cache_tokens, streaming
        return (self._builder.build_group(prompt, *shared) for prompt in encoded)

    def _score(self, jobs: list[scoring.ScoreJob], deadline: float | None) -> list[Score]:
        seconds = deadline_seconds(deadline)
        self._check_deadline(seconds)
        groups: list[RequestGroup] = []

        def build(since: float) -> list[RequestGroup]:
            expires, cache_tokens = since + seconds, self._session.cache_tokens
            groups[:] = scoring.scoring_requests(self._builder, jobs, expires, cache_tokens)
            return scoring.longest_first(groups)

        with defer_full_gc():
            self._runner.run_to_completion(lambda: build)
            return [scoring.to_score(group) for group in groups]
