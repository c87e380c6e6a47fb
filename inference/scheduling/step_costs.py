"""Limit the prompt tokens of a step while requests decode, from the measured time of earlier steps.

The seconds of a step, base + per token x tokens, are to meet `target_itl`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_MEMORY = 0.98
"""Weight of what was known before a step, after it."""
_MIN_STEPS = 4
_OUTLIER = 3.0
"""A step that took this many times its estimate counts as that: it waited, or was captured."""


class StepCosts:
    """A line through the newest steps, fitted as they end.

    >>> costs = StepCosts()
    >>> for tokens in (100, 500, 100, 1000):
    ...     costs.record(tokens, 1e-3 + 1e-6 * tokens)
    >>> round(costs.estimate(2000), 6), costs.tokens_within(0.005)
    (0.003, 4000)
    """

    def __init__(
        self, target_itl: float | None = None, max_tokens_while_decoding: int | None = None
    ):
        """Start without measurements.

        target_itl: target inter-token latency in seconds; None: throughput.
        max_tokens_while_decoding: without a target, maximum tokens of a captured step.
        """
        self.target_itl = target_itl
        self.max_tokens_while_decoding = max_tokens_while_decoding
        self._num_steps = 0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Update the estimate with a step."""
        if self._num_steps >= _MIN_STEPS:
            seconds = min(seconds, _OUTLIER * self.estimate(num_tokens))
        self._num_steps += 1
        self._weight = _MEMORY * self._weight + 1
        self._tokens = _MEMORY * self._tokens + num_tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + num_tokens**2
        self._products = _MEMORY * self._products + num_tokens * seconds

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds that a step with `num_tokens` takes."""
        base, per_token = self._line()
        return base + per_token * num_tokens

    def tokens_within(self, seconds: float) -> int | None:
        """Return how many tokens fit into a step of `seconds`; None if not known yet."""
        if self._num_steps < _MIN_STEPS:
            return None
        base, per_token = self._line()
        return max(0, round((seconds - base) / per_token)) if per_token > 0 else None

    def max_tokens(self, sizes: Sequence[int]) -> int | None:
        """Return the maximum tokens of a step while requests decode; None: no limit.

        sizes: `Runner.step_sizes`.
        """
        tokens, limit = None, self.max_tokens_while_decoding
        if self.target_itl is not None:
            tokens = self.tokens_within(self.target_itl)
        if tokens is None:
            # Only captured steps are capped: the time of an eager one hardly depends on its tokens.
            return limit if limit is not None and sizes and limit <= sizes[-1] else None
        if not sizes or tokens > sizes[-1]:
            return tokens
        return sizes[max(bisect_right(sizes, tokens) - 1, 0)]

    def _line(self) -> tuple[float, float]:
        mean, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean**2
        if spread <= 1e-6 * mean**2:  # steps of one size: half of the time is taken to be the base
            return mean_seconds / 2, mean_seconds / 2 / max(mean, 1)
        slope = (self._products / self._weight - mean * mean_seconds) / spread
        slope = min(max(slope, 1e-9), mean_seconds / max(mean, 1))
        return mean_seconds - slope * mean, slope
