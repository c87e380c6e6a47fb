"""The `n` requests of one prompt: their text, their stream events and their completion."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .detokenizer import CONTEXT_TOKENS, Detokenizer, added_text, find_stop
from .outputs import Completion, StreamEvent, TokenLogprob
from .request import Request
from .tokenization import TokenizerAdapter


@dataclass(slots=True)
class _TextState:
    """Text of one request, and how much of it the caller has received."""

    detokenizer: Detokenizer
    num_detokenized: int = 0
    num_tokens_sent: int = 0
    num_chars_sent: int = 0
    stop_start: int | None = None
    """Where the stop string starts that ended the request. Earlier ones, before `min_tokens`, are
    ordinary text."""


class RequestGroup:
    """The `n` requests of one prompt; done when all of them are."""

    def __init__(self, group_id: int, tokenizer: TokenizerAdapter, streaming: bool):
        self.id = group_id
        self.requests: list[Request] = []
        self.prompt_token_ids: np.ndarray | None = None
        """Set as soon as the prompt is tokenized, also if the request is then rejected."""
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
        """The completion, with those of the other samples in `others`."""
        if self._failure is not None:
            return Completion(
                [], None, "error", error=self._failure, prompt_token_ids=self._prompt()
            )
        first, *others = [self._completion(request) for request in self.requests]
        return replace(first, others=tuple(others)) if others else first

    def detokenize(self, request: Request) -> bool:
        """Decode its new tokens where they are needed now; return whether a stop string ended."""
        stops = request.params.stop
        if not stops and not (self._streaming and self._tokenizer.has_tokenizer):
            return False
        state = self._text(request)
        new_tokens = request.output_token_ids[state.num_detokenized :]
        state.num_detokenized += len(new_tokens)
        if not new_tokens or not (new_text := state.detokenizer.push(new_tokens)):
            return False
        if not stops or len(request.output_token_ids) <= request.params.min_tokens:
            return False
        state.stop_start = find_stop(state.detokenizer.text, len(new_text), tuple(stops))
        return state.stop_start is not None

    def event(self, request: Request, final: bool) -> StreamEvent | None:
        """What the caller has not received yet, if it streams; with the completion if final."""
        completion = self.result() if final else None
        sample_index = self.requests.index(request) if len(self.requests) > 1 else 0
        if not self._streaming:
            return StreamEvent(self.id, [], "", completion, sample_index) if completion else None
        state = self._text(request)
        tokens = request.output_token_ids[state.num_tokens_sent :]
        state.num_tokens_sent += len(tokens)
        text = self._stable_text(request, state)[state.num_chars_sent :]
        state.num_chars_sent += len(text)
        return StreamEvent(self.id, tokens, text, completion, sample_index)

    def _stable_text(self, request: Request, state: _TextState) -> str:
        """Text that will not change: an end that may become a stop string is held back."""
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
            logprobs=_logprobs(request),
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


def _logprobs(request: Request) -> list[TokenLogprob] | None:
    if request.params.logprobs is None:
        return None
    return [
        TokenLogprob(token, logprob, dict(zip(top_tokens, top_logprobs, strict=True)))
        for token, logprob, top_tokens, top_logprobs in request.logprobs
    ]


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """One entry per prompt token; None for the first, which nothing predicts."""
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
