"""Turn sampled tokens into text, stream events and a `Completion` per prompt; find stop strings.

    a step of any call ─▶ updated requests ─▶ the event queue of the call that submitted them

Every step runs the requests of all callers. Each group has the queue that its caller reads. It puts
exactly one completion there, whichever call runs the last step and however that step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from .detokenizer import CONTEXT_TOKENS, Detokenizer, added_text, find_stop
from .outputs import Completion, StreamEvent, TokenLogprob
from .request import Request
from .tokenizer_adapter import TokenizerAdapter

EventQueue = deque[StreamEvent]
"""Events that a caller has not read yet."""


class OutputProcessor:
    """The groups that are not done, and the queue of each."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[RequestGroup, EventQueue]] = {}
        self._group_of: dict[int, RequestGroup] = {}
        """By request id."""

    def has_requests(self) -> bool:
        return bool(self._groups)

    def add(self, groups: Iterable[RequestGroup], queue: EventQueue) -> None:
        """Track groups; those that have already failed are answered at once."""
        for group in groups:
            if group.done:
                queue.append(_final_event(group))
            else:
                self._groups[group.id] = group, queue
                for request in group.requests:
                    self._group_of[request.id] = group

    def get(self, group_id: int) -> RequestGroup | None:
        return self._groups[group_id][0] if group_id in self._groups else None

    def remove(self, group: RequestGroup) -> None:
        self._groups.pop(group.id, None)
        for request in group.requests:
            self._group_of.pop(request.id, None)

    def detokenize(self, updated: Iterable[Request]) -> dict[int, int]:
        """Decode new tokens; return how many reach a stop string, by id of the request."""
        return {r.id: n for r in updated if (n := self._group_of[r.id].detokenize(r)) is not None}

    def publish(self, updated: list[Request]) -> None:
        """Queue the new events, the completion of a group last, and remove finished groups."""
        groups = [self._group_of[request.id] for request in updated]
        last = {group.id: request for group, request in zip(groups, updated, strict=True)}
        for group, request in zip(groups, updated, strict=True):
            final = request.finish_reason is not None and group.done and last[group.id] is request
            event = group.event(request, final)
            if event is not None:
                self._groups[group.id][1].append(event)
            if final:
                self.remove(group)

    def fail_all(self, error: str) -> list[Request]:
        """End every group with an error; return the requests that were not finished."""
        groups = [group for group, _ in self._groups.values()]
        unfinished = [r for group in groups for r in group.requests if r.finish_reason is None]
        for group, queue in list(self._groups.values()):
            self.remove(group)
            group.fail(error)
            queue.append(_final_event(group))
        return unfinished


def _final_event(group: RequestGroup) -> StreamEvent:
    return StreamEvent(group.id, [], "", group.result())


@dataclass(slots=True)
class _TextState:
    """Text of one request, and how much of it the caller has received."""

    detokenizer: Detokenizer
    num_detokenized: int = 0
    num_tokens_sent: int = 0
    num_chars_sent: int = 0
    stop_start: int | None = None
    """Start of the stop string that ended the request. Those before `min_tokens` are ordinary
    text."""


class RequestGroup:
    """The `n` requests of one prompt; done when all of them are."""

    def __init__(self, group_id: int, tokenizer: TokenizerAdapter, streaming: bool):
        self.id = group_id
        self.requests: list[Request] = []
        self.prompt_token_ids: np.ndarray | None = None
        """Set once the prompt is tokenized, even if the request is then rejected."""
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._failure: str | None = None
        self._texts: dict[int, _TextState] = {}

    @property
    def done(self) -> bool:
        return self._failure is not None or all(r.finish_reason for r in self.requests)

    @property
    def error(self) -> str | None:
        """Why the group, or one of its requests, failed."""
        if self._failure is not None:
            return self._failure
        return next((r.error for r in self.requests if r.error), None)

    def fail(self, error: str) -> None:
        """End the group with an error, before or while it runs."""
        self._failure = error
        self.requests = []

    def result(self) -> Completion:
        """Return the completion, with those of the other samples in `others`."""
        if self._failure is not None:
            return Completion(
                [], None, "error", error=self._failure, prompt_token_ids=self._prompt()
            )
        first, *others = [self._completion(request) for request in self.requests]
        return replace(first, others=tuple(others)) if others else first

    def detokenize(self, request: Request) -> int | None:
        """Decode new tokens if they are needed now; return how many reach a stop string, if any."""
        stops = request.params.stop
        if not stops and not (self._streaming and self._tokenizer.has_tokenizer):
            return None
        state = self._text(request)
        for token in request.output_token_ids[state.num_detokenized :]:
            state.num_detokenized += 1
            new_text = state.detokenizer.push([token])
            if new_text and stops and state.num_detokenized > request.params.min_tokens:
                text = state.detokenizer.text
                state.stop_start = find_stop(text, len(new_text), tuple(stops))
                if state.stop_start is not None:
                    return state.num_detokenized
        return None

    def event(self, request: Request, final: bool) -> StreamEvent | None:
        """Return what a stream has not received yet; the final event has the completion."""
        completion = self.result() if final else None
        sample_index = self.requests.index(request) if len(self.requests) > 1 else 0
        if not self._streaming:
            return StreamEvent(self.id, [], "", completion, sample_index) if completion else None
        state = self._text(request)
        first = state.num_tokens_sent
        tokens = request.output_token_ids[first:]
        logprobs = _token_logprobs(request, first)
        state.num_tokens_sent += len(tokens)
        text = self._stable_text(request, state)[state.num_chars_sent :]
        state.num_chars_sent += len(text)
        return StreamEvent(self.id, tokens, text, completion, sample_index, logprobs)

    def _stable_text(self, request: Request, state: _TextState) -> str:
        """Return the text that will not change, without an end that may become a stop string."""
        if not self._tokenizer.has_tokenizer:
            return ""
        detokenizer = state.detokenizer
        if request.finish_reason is not None:
            detokenizer.flush()
            return detokenizer.text[: state.stop_start]
        num_held_back = max((len(stop) - 1 for stop in request.params.stop), default=0)
        return detokenizer.text[: max(len(detokenizer.text) - num_held_back, 0)]

    def _text(self, request: Request) -> _TextState:
        if request.id not in self._texts:
            detokenizer = Detokenizer(self._tokenizer.decode, _context(request))
            self._texts[request.id] = _TextState(detokenizer)
        return self._texts[request.id]

    def _completion(self, request: Request) -> Completion:
        return Completion(
            token_ids=list(request.output_token_ids),
            text=self._full_text(request),
            finish_reason=request.finish_reason or "error",
            logprobs=_token_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            error=request.error,
            prompt_token_ids=self._prompt(),
        )

    def _full_text(self, request: Request) -> str | None:
        state = self._texts.get(request.id)
        if state is not None and state.stop_start is not None:
            return state.detokenizer.text[: state.stop_start]
        if not self._tokenizer.has_tokenizer:
            return None
        context = _context(request)  # without it, some tokenizers drop the first space
        text = self._tokenizer.decode([*context, *request.output_token_ids])
        return added_text(self._tokenizer.decode(context), text)

    def _prompt(self) -> list[int] | None:
        return None if self.prompt_token_ids is None else self.prompt_token_ids.tolist()


def _context(request: Request) -> list[int]:
    return request.prompt_token_ids[-CONTEXT_TOKENS:].tolist()


def _token_logprobs(request: Request, first: int = 0) -> list[TokenLogprob] | None:
    """Return the entries of the new tokens from number `first` on."""
    if request.params.logprobs is None:
        return None
    return [
        TokenLogprob(token, logprob, dict(zip(top_tokens, top_logprobs, strict=True)))
        for token, logprob, top_tokens, top_logprobs in request.logprobs[first:]
    ]


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """Return one entry per prompt token; None for the first, which no token predicts."""
    if request.params.prompt_logprobs is None:
        return None
    entries: list[TokenLogprob | None] = [None]
    for position, token in enumerate(request.prompt_token_ids[1:].tolist(), start=1):
        if position not in request.scores:
            entries.append(None)
            continue
        logprob, _, top_tokens, top_logprobs = request.scores[position]
        top = dict(zip(top_tokens, top_logprobs, strict=True))
        entries.append(TokenLogprob(token, logprob, top))
    return entries
