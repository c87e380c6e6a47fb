"""`Completion`, `Score`, `StreamEvent`, `TokenLogprob`: what the engine's calls return."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token: raw, or after the sampling parameters (`logprobs_mode`)."""

    token_id: int
    """The token."""
    logprob: float
    """Its natural log-probability."""
    top_logprobs: dict[int, float] = field(default_factory=dict)
    """The most likely tokens, as many as were requested, most likely first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens a request generated, and why they end."""

    token_ids: list[int]
    """The new tokens, without the prompt."""
    text: str | None
    """Their text; None without a tokenizer."""
    finish_reason: str
    """"stop", "length", "deadline", "abort" or "error"."""
    logprobs: list[TokenLogprob] | None = None
    """One per new token, if `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per token of the prompt, None for the first, if `prompt_logprobs` asked for them."""
    error: str | None = None
    """Why the request failed; None if it did not."""
    prompt_token_ids: list[int] | None = None
    """The prompt as the model saw it; None if it could not be tokenized."""
    others: tuple[Completion, ...] = ()
    """The other n - 1 completions of the same prompt."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One increment of a streamed request: new tokens and text; the last one has the completion."""

    request_id: int
    """What `add_request` returned; in `stream`, the index of the prompt."""
    token_ids: list[int]
    """The tokens since the last event."""
    text: str
    """Their text, as far as its characters are complete."""
    completion: Completion | None = None
    """The whole completion, in the last event of a request."""
    sample_index: int = 0
    """Which of the prompt's `n` completions the tokens belong to."""
    logprobs: list[TokenLogprob] | None = None
    """One per token since the last event, if `SamplingParams.logprobs` asked for them."""


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of a continuation given its context."""

    logprob: float
    """Sum over the continuation's tokens."""
    is_greedy: bool
    """Whether every token of the continuation was the most likely one."""
    token_logprobs: list[float]
    """The log-probability of each token."""
    error: str | None = None
    """Why it could not be scored; None if it was."""
