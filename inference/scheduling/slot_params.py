"""What a step needs to know of each running request, as columns indexed by slot.

A request gets a slot when it is admitted and its settings are written here once. A step then takes
whole columns by index, so its cost in Python does not grow with the batch.
"""

from __future__ import annotations

import numpy as np

from ..requests.request import Request

_ALL = 2**31 - 1
"""More than any vocabulary has, and less than columns hold."""


class SlotParams:
    """Sampling settings of the running requests, one row a slot."""

    def __init__(self, count: int):
        self.seed = np.zeros(count, dtype=np.uint64)
        self.temperature = np.zeros(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.top_p = np.ones(count, dtype=np.float32)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.filters = np.zeros(count, dtype=bool)
        self.repetition = np.ones(count, dtype=np.float32)
        self.presence = np.zeros(count, dtype=np.float32)
        self.frequency = np.zeros(count, dtype=np.float32)
        self.penalises = np.zeros(count, dtype=bool)
        self.logprobs = np.full(count, -1, dtype=np.int64)
        """Alternatives wanted beside each token's own log-probability; -1: not even that."""
        self.prompt_length = np.zeros(count, dtype=np.int64)
        self.edited = np.zeros(count, dtype=bool)
        """Whether single logits are changed: bias, or tokens banned for now."""

    def admit(self, request: Request) -> None:
        """Write the settings of a request into its slot."""
        slot, p = request.slot, request.params
        self.seed[slot] = request.seed
        self.temperature[slot] = 0 if p.is_greedy else p.temperature
        self.top_k[slot] = min(p.top_k, _ALL)
        self.top_p[slot], self.min_p[slot] = p.top_p, p.min_p
        self.filters[slot] = p.has_filters
        self.repetition[slot] = p.repetition_penalty
        self.presence[slot] = p.presence_penalty
        self.frequency[slot] = p.frequency_penalty
        self.penalises[slot] = p.has_penalties
        self.logprobs[slot] = -1 if p.logprobs is None else min(p.logprobs, _ALL)
        self.prompt_length[slot] = len(request.prompt)
        self.edited[slot] = bool(p.logit_bias) or (p.min_tokens > 0 and bool(request.stop_ids))
