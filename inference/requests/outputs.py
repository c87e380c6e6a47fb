"""What comes back for a request: always exactly one value, whatever happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's own distribution, before any sampling knob."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float] = field(default_factory=dict)
    """The likeliest tokens, as many as were asked for, likeliest first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens a request produced, and why they end."""

    token_ids: list[int]
    text: str | None
    finish_reason: str
    """"stop", "length", "deadline", "abort" or "error"."""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    others: tuple[Completion, ...] = ()
    """With `n` > 1: the other completions of the same prompt."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One moment of a streamed request: new tokens and text, and the whole of it at its end."""

    request_id: int
    token_ids: list[int]
    text: str
    completion: Completion | None = None
    sample_index: int = 0
    """Which of the prompt's `n` completions the tokens belong to."""


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of a continuation given its context."""

    logprob: float
    is_greedy: bool
    """Whether each token was the likeliest one at its place."""
    token_logprobs: list[float]
    error: str | None = None
