"""`Request`: one sequence on its way through the engine, described by a few counters.

    tokens         [ p p p p p p p p | o o o ]        prompt, then output
    num_computed     ───────────▶                     keys and values are in the cache up to here
    num_scheduled               ────▶                 tokens the next step runs
    num_tokens       ─────────────────────▶           tokens that exist (the last may still be on
                                                      the device only)

A new prompt, a chunk of one, the rest after a prefix hit, a decode and a restart after preemption
differ only in these numbers. When `num_computed` reaches `num_tokens`, the step samples one token.
A request that is only scored has its prompt's length as `max_len`, so it never samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue or to score."""

    id: int
    prompt_token_ids: np.ndarray
    """int64 token ids: at least one, at least two if the request is only scored."""
    max_len: int
    """Maximum number of tokens, prompt included."""
    params: SamplingParams
    seed: int = 0
    """Key of the random numbers, together with the position."""
    priority: int = 0
    """Lower values run first and are preempted last."""
    deadline: float = float("inf")
    """Clock time at which the request returns what it has."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end it, end-of-text tokens included."""
    score_from: int | None = None
    """First prompt position whose log-probability is wanted; None: none."""
    needs_host_check: bool = False
    """Whether every step returns it: it is streamed, or has stop strings or log-probabilities."""

    prompt_len: int = field(init=False)
    """Length of the prompt; an attribute, because steps read it often and `len()` is slower."""
    arrival: int = 0
    """Position in the arrival order, kept through preemption; 0: never queued."""
    num_computed: int = 0
    num_scheduled: int = 0
    num_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    """New tokens that the host has read."""
    logprobs: list[tuple[int, float, list[int], list[float]]] = field(default_factory=list)
    """Per new token, if requested: token, log-probability, top tokens, their log-probabilities."""
    scores: dict[int, tuple[float, bool, list[int], list[float]]] = field(default_factory=dict)
    """By position: log-probability, is greedy, top tokens, their log-probabilities."""
    draft: list[int] = field(default_factory=list)
    """Tokens after the newest one that the next step verifies; part of `num_scheduled` only."""
    row: int = -1
    """Row in the batch (page table and per-row parameters) while it runs; -1 otherwise."""
    num_pages: int = 0
    """Pages it holds."""
    num_preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_len = len(self.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to run until it samples or is scored; the last token is never fed back."""
        return min(self.num_tokens, self.max_len - 1) - self.num_computed

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled on the device that the host has not read yet."""
        return self.num_tokens - self.prompt_len - len(self.output_token_ids)

    @property
    def at_max_len(self) -> bool:
        """Whether the host has read all tokens that `max_len` allows."""
        return self.prompt_len + len(self.output_token_ids) >= self.max_len

    @property
    def max_prefix_hit(self) -> int:
        """Leading tokens that a prefix hit may cover; positions with logits must be computed."""
        end = self.num_tokens
        if self.score_from is not None:
            end = min(self.score_from, end)
        return max(end - 1, 0)

    def scored_positions(self, start: int, stop: int) -> range:
        """Positions in [start, stop) whose logits score the token after them."""
        if self.score_from is None:
            return range(0)
        return range(max(start, self.score_from - 1), min(stop, self.prompt_len - 1))

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Token ids at positions [start, stop), all known to the host; drafts follow the others."""
        prompt_len = self.prompt_len
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - prompt_len, 0) : stop - prompt_len]
        if self.draft:
            output += self.draft[: max(stop - self.num_tokens, 0)]
        new = np.asarray(output, dtype=np.int64)
        return new if start >= prompt_len else np.concatenate([self.prompt_token_ids[start:], new])
