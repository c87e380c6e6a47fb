"""Sample tokens from logits for all rows of a step, on the device; gather log-probabilities.

    logits ─▶ bias, bans ─▶ penalties ─▶ temperature ─▶ top-k, top-p, min-p ─▶ sample
      └─▶ raw log-probabilities                                      └─▶ processed ones

Rows are independent: the settings of one row never change the token of another. A token is sampled
by inverting the cumulative distribution, in vocabulary order and float64, at a uniform number that
the host computed from (seed, position). A row with a NaN among its logits yields token -1; if it is
sampled and not greedy, so does one with a plus infinity, or with minus infinities only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..scheduling.step import SamplingInputs
from .logits_processing import edit_logits, scale_logits

try:
    from ...kernels import argmax
except ImportError:  # Triton is not installed
    argmax = None


def sample(
    logits: Tensor, inputs: SamplingInputs[Tensor], token_history: Tensor | None = None
) -> Tensor:
    """Choose a token for each row of [S, V] logits; int64 [S], -1 for rows without a valid one.

    token_history: int64 [batch rows, L], prompt and output tokens, for penalties.
    """
    logits = edit_logits(logits, inputs, token_history)
    token = _argmax(logits)
    if inputs.temperature is not None and inputs.uniform is not None:
        drawn = _sample_from_cdf(scale_logits(logits, inputs), inputs.uniform)
        token = torch.where(inputs.temperature > 0, drawn, token)
    return token


def _argmax(logits: Tensor) -> Tensor:
    """Return the token of each row's largest logit, -1 for rows with a NaN."""
    if logits.is_cuda and argmax is not None:
        return argmax(logits)
    best, token = logits.max(dim=-1)
    return torch.where(best.isnan(), -1, token)


def _sample_from_cdf(scaled: Tensor, uniform: Tensor) -> Tensor:
    cdf = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below = cdf <= uniform[:, None] * total
    token = below.sum(dim=-1).clamp_(max=scaled.shape[-1] - 1)
    # Infinite logits, and rows in which every token is banned, have no distribution.
    return torch.where(total[:, 0].isnan(), -1, token)


class Logprobs(NamedTuple):
    """Log-probabilities of one token per row, and of the most likely ones."""

    logprob: Tensor
    is_greedy: Tensor
    """Whether the token has the largest logit."""
    top_tokens: Tensor
    top_logprobs: Tensor


def gather_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of one token per row, and of the `num_top` most likely ones.

    Rows whose logits contain a NaN or an infinity, or are all minus infinity, give NaN.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    total = torch.where(total.isfinite(), total, torch.nan)
    chosen = logits.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    best, top_tokens = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(
        chosen - total, chosen >= logits.max(dim=-1).values, top_tokens, best - total[:, None]
    )
