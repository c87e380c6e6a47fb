"""A request on its way through the engine.

Two counters say where it stands, a third what the next step does with it:

    tokens   [ p p p p p p p p | o o o ]        prompt, then output
    computed   ───────────▶                     keys and values are in the cache up to here
    planned                ────▶                what the next step runs
    length     ─────────────────────▶           tokens that exist (the newest maybe not on the host)

A fresh prompt, a chunk of one, what a prefix hit leaves, a decode and a restart after preemption
differ only in these numbers. When `computed` reaches `length`, the step yields one token more.
A request to be scored is one whose limit is its prompt: it never gets there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued or scored."""

    id: int
    prompt: np.ndarray
    """int64 token ids, at least one; at least two if it is only scored."""
    limit: int
    """Tokens it may reach, prompt included."""
    params: SamplingParams
    seed: int = 0
    """What its draws are keyed by, together with the position."""
    priority: int = 0
    """Lower runs first and is preempted last."""
    deadline: float = float("inf")
    """Clock time at which it returns what it has."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    score_from: int | None = None
    """First position of the prompt whose own log-probability is wanted; None: none."""
    watched: bool = False
    """Whether each new token is looked at one by one: streamed, stop strings, log-probabilities."""

    order: int = 0
    """Place in the queue among equals; kept through preemption."""
    computed: int = 0
    planned: int = 0
    length: int = 0
    output: list[int] = field(default_factory=list)
    """New tokens the host has seen."""
    logprobs: list[tuple[int, float, list[int], list[float]]] = field(default_factory=list)
    """Of each new token, if asked for: itself, its log-probability, the likeliest and theirs."""
    scores: dict[int, tuple[float, bool, list[int], list[float]]] = field(default_factory=dict)
    """By position: log-probability, whether it was the likeliest, the likeliest and theirs."""
    slot: int = -1
    """Its row in the device's and the host's per-request columns while it runs."""
    held: int = 0
    """Pages it holds."""
    preempted: int = 0
    """How often it had to give them back."""
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.length = len(self.prompt)

    @property
    def need(self) -> int:
        """Tokens to run until it yields something; the last token is never fed back."""
        return min(self.length, self.limit - 1) - self.computed

    @property
    def in_flight(self) -> int:
        """Tokens sampled on the device that the host has not read yet."""
        return self.length - len(self.prompt) - len(self.output)

    @property
    def reusable(self) -> int:
        """Leading tokens a prefix hit may cover: rows that yield something must be computed."""
        rows = self.length if self.score_from is None else min(self.score_from, self.length)
        return max(rows - 1, 0)

    def scored_rows(self, start: int, stop: int) -> range:
        """Positions in [start, stop) whose logits are needed to score the token after them."""
        if self.score_from is None:
            return range(0)
        return range(max(start, self.score_from - 1), min(stop, len(self.prompt) - 1))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids at positions [start, stop), all known to the host."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        made = np.asarray(self.output[max(start - n, 0) : stop - n], dtype=np.int64)
        return made if start >= n else np.concatenate([self.prompt[start:], made])
