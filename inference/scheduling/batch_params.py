"""Sampling parameters of the running requests, as arrays indexed by batch row.

A request gets a row when it is admitted, and its parameters are written here once. A step then
indexes whole arrays, so its Python cost does not grow with the batch.
"""

from __future__ import annotations

import numpy as np

from ..requests.request import Request

_UNLIMITED = 2**31 - 1
"""Larger than any vocabulary, and small enough for every integer type used here."""


class BatchParams:
    """Sampling parameters by batch row."""

    def __init__(self, num_rows: int):
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.has_filters = np.zeros(num_rows, dtype=bool)
        self.repetition_penalty = np.ones(num_rows, dtype=np.float32)
        self.presence_penalty = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_rows, dtype=np.float32)
        self.has_penalties = np.zeros(num_rows, dtype=bool)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        """Alternatives reported beside each token's log-probability; -1: report nothing."""
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.has_logit_edits = np.zeros(num_rows, dtype=bool)
        """Whether single logits are changed: a bias, or stop tokens before `min_tokens`."""

    def admit(self, request: Request) -> None:
        """Write the parameters of a request into its row."""
        row, p = request.row, request.params
        self.seed[row] = request.seed
        self.temperature[row] = 0 if p.is_greedy else p.temperature
        self.top_k[row] = min(p.top_k, _UNLIMITED)
        self.top_p[row], self.min_p[row] = p.top_p, p.min_p
        self.has_filters[row] = p.has_filters
        self.repetition_penalty[row] = p.repetition_penalty
        self.presence_penalty[row] = p.presence_penalty
        self.frequency_penalty[row] = p.frequency_penalty
        self.has_penalties[row] = p.has_penalties
        self.num_logprobs[row] = -1 if p.logprobs is None else min(p.logprobs, _UNLIMITED)
        self.prompt_len[row] = request.prompt_len
        may_ban_stops = p.min_tokens > 0 and bool(request.stop_token_ids)
        self.has_logit_edits[row] = bool(p.logit_bias) or may_ban_stops
