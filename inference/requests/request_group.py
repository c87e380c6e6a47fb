"""The requests of one prompt, from their tokens to the completion a caller gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .detokenizer import Detokenizer, find_stop
from .outputs import Completion, StreamEvent, TokenLogprob
from .request import Request
from .tokenization import TokenizerAdapter


class RequestGroup:
    """One prompt's `n` requests; done when all of them are."""

    def __init__(self, number: int, tongue: TokenizerAdapter, streaming: bool):
        self.id = number
        self.requests: list[Request] = []
        self._tongue = tongue
        self._streaming = streaming
        self._refusal: Completion | None = None
        self._texts: dict[int, Detokenizer] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        """Of each request: tokens and characters already handed to the caller."""
        self._cut: dict[int, int] = {}
        """Where the stop string begins that ended a request; one before `min_tokens` is text."""

    @property
    def done(self) -> bool:
        return self._refusal is not None or all(r.finish_reason for r in self.requests)

    @property
    def error(self) -> str | None:
        """Why nothing, or not all, came of it."""
        if self._refusal is not None:
            return self._refusal.error
        return next((r.error for r in self.requests if r.error), None)

    def refuse(self, error: str) -> None:
        """End it with an error, before or while it runs."""
        self._refusal = Completion([], None, "error", error=error)
        self.requests = []

    def result(self) -> Completion:
        """The completion, its siblings with it."""
        if self._refusal is not None:
            return self._refusal
        first, *rest = [self._completion(request) for request in self.requests]
        if rest:
            first = Completion(
                first.token_ids,
                first.text,
                first.finish_reason,
                first.logprobs,
                first.prompt_logprobs,
                first.error,
                tuple(rest),
            )
        return first

    def text_ends(self, request: Request) -> bool:
        """Whether the newest token completed a stop string."""
        stops = request.params.stop
        if not stops:
            return False
        text = self._text(request)
        new = text.push(request.output[-1:])
        if not new or len(request.output) <= request.params.min_tokens:
            return False
        place = find_stop(text.text, len(new), tuple(stops))
        if place is not None:
            self._cut[request.id] = place
        return place is not None

    def event(self, request: Request, final: bool) -> StreamEvent | None:
        """What the caller has not been told yet, if it wants to hear; finally, the whole."""
        completion = self.result() if final else None
        sample_index = self.requests.index(request) if len(self.requests) > 1 else 0
        if not self._streaming:
            return StreamEvent(self.id, [], "", completion, sample_index) if completion else None
        tokens_sent, sent = self._sent.get(request.id, (0, 0))
        tokens = request.output[tokens_sent:]
        text = self._visible(request, tokens) if self._tongue.tokenizer is not None else ""
        self._sent[request.id] = (len(request.output), max(len(text), sent))
        return StreamEvent(self.id, tokens, text[sent:], completion, sample_index)

    def _visible(self, request: Request, new: list[int]) -> str:
        """Text that cannot be taken back: what may still become a stop string is not shown yet."""
        text = self._text(request)
        if not request.params.stop:
            text.push(new)
        if request.finish_reason is not None:
            text.flush()
            return text.text[: self._cut.get(request.id)]
        held = max((len(s) - 1 for s in request.params.stop), default=0)
        return text.text[: max(len(text.text) - held, 0)]

    def _text(self, request: Request) -> Detokenizer:
        if request.id not in self._texts:
            self._texts[request.id] = Detokenizer(self._tongue.decode, _context(request))
        return self._texts[request.id]

    def _completion(self, request: Request) -> Completion:
        text = None
        if request.id in self._cut:
            text = self._text(request).text[: self._cut[request.id]]
        elif self._tongue.tokenizer is not None:
            context = _context(request)  # without it, some tokenizers leave the first space out
            text = self._tongue.decode([*context, *request.output])
            text = text[len(self._tongue.decode(context)) :]
        return Completion(
            token_ids=list(request.output),
            text=text,
            finish_reason=request.finish_reason or "error",
            logprobs=_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            error=request.error,
        )


def longest_first(groups: Iterable[RequestGroup]) -> deque[Request]:
    """All requests, those that may run longest at the head: short ones fill the gaps at the end."""
    requests = [request for group in groups for request in group.requests]
    return deque(sorted(requests, key=lambda r: -r.limit))


def _context(request: Request) -> list[int]:
    """As much of the prompt as the text of the next token depends on."""
    return request.prompt[-4:].tolist()


def _logprobs(request: Request) -> list[TokenLogprob] | None:
    if request.params.logprobs is None:
        return None
    return [
        TokenLogprob(token, logprob, dict(zip(best, others, strict=True)))
        for token, logprob, best, others in request.logprobs
    ]


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """One entry per prompt token; the first has no token before it to be predicted from."""
    if request.params.prompt_logprobs is None:
        return None
    entries: list[TokenLogprob | None] = [None]
    for position, token in enumerate(request.prompt[1:].tolist(), start=1):
        score = request.scores.get(position)
        if score is None:
            entries.append(None)
        else:
            top = dict(zip(score[2], score[3], strict=True))
            entries.append(TokenLogprob(token, score[0], top))
    return entries
