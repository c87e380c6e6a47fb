"""Sampling: from logits to tokens, for all rows of a step at once, on the device.

    logits ─▶ bias, bans ─▶ penalties ─▶ temperature ─▶ top-k, top-p, min-p ─▶ sample
      └─▶ raw log-probabilities                                      └─▶ processed ones

Rows are independent: the settings of one row never change the token of another. A token is sampled
by inverting the cumulative distribution, in vocabulary order and float64, at a uniform number that
the host computed from (seed, position). A row with a NaN among its logits yields token -1; if it is
sampled and not greedy, a row with an infinity does too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..scheduling.step import Filters, Penalties, SamplingInputs

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
    logits = _edit_logits(logits, inputs, token_history)
    token = _argmax(logits)
    if inputs.temperature is not None and inputs.uniform is not None:
        drawn = _sample_from_cdf(_scale_logits(logits, inputs), inputs.uniform)
        token = torch.where(inputs.temperature > 0, drawn, token)
    return token


def process_logits(
    logits: Tensor, inputs: SamplingInputs[Tensor], token_history: Tensor | None = None
) -> Tensor:
    """Return the logits [S, V] of the distributions that `sample` samples from."""
    return _scale_logits(_edit_logits(logits, inputs, token_history), inputs)


def _edit_logits(
    logits: Tensor, inputs: SamplingInputs[Tensor], token_history: Tensor | None
) -> Tensor:
    """Apply biases, bans and penalties to a copy of the logits."""
    if inputs.edits is not None or inputs.penalties is not None:
        logits = logits.float().clone()
    if inputs.edits is not None:
        e = inputs.edits
        logits.index_put_((e.rows, e.tokens), e.values, accumulate=True)
    if inputs.penalties is not None:
        assert token_history is not None
        _apply_penalties(logits, inputs.penalties, token_history[inputs.penalties.batch_rows])
    return logits


def _scale_logits(logits: Tensor, inputs: SamplingInputs[Tensor]) -> Tensor:
    """Divide by the temperature and apply top-k, top-p and min-p; greedy rows keep their logits."""
    if inputs.temperature is None:
        return logits
    temperature = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)
    scaled = logits.float() / temperature[:, None]
    if inputs.filters is not None:
        f = inputs.filters
        scaled = scaled.index_copy(0, f.rows, _filter_logits(scaled[f.rows], f))
    return scaled


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


def _filter_logits(scaled: Tensor, f: Filters[Tensor]) -> Tensor:
    """Set logits outside top-k, top-p and min-p to minus infinity; the largest one is kept."""
    sorted_logits, index = scaled.sort(dim=-1, descending=True, stable=True)
    position = torch.arange(scaled.shape[-1], device=scaled.device)
    k = torch.where(f.top_k > 0, f.top_k, scaled.shape[-1])
    sorted_logits = sorted_logits.masked_fill(position >= k[:, None], -torch.inf)
    p = sorted_logits.softmax(dim=-1)
    before = p.cumsum(dim=-1, dtype=torch.float64) - p
    drop = (before >= f.top_p[:, None]) & (f.top_p < 1)[:, None]
    drop |= p < f.min_p[:, None] * p[:, :1]
    drop |= position >= k[:, None]
    drop[:, 0] = False
    return scaled.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)


def _apply_penalties(logits: Tensor, p: Penalties[Tensor], history: Tensor) -> None:
    """Apply the three penalties to their rows, in place; history: the tokens of these rows."""
    logit_rows, vocab_size = logits[p.rows], logits.shape[-1]
    position = torch.arange(history.shape[1], device=logits.device)
    in_history = position < p.lengths[:, None]
    in_output = in_history & (position >= p.prompt_lengths[:, None])
    # Positions outside a row's history are counted in an extra column past the vocabulary.
    counts = logit_rows.new_zeros(len(logit_rows), vocab_size + 1)
    seen = counts.scatter(1, history.where(in_history, vocab_size), 1.0)[:, :-1] > 0
    counts.scatter_add_(1, history.where(in_output, vocab_size), in_output.to(logit_rows.dtype))
    counts = counts[:, :-1]
    repetition = p.repetition[:, None]
    penalized = torch.where(logit_rows > 0, logit_rows / repetition, logit_rows * repetition)
    logit_rows = torch.where(seen, penalized, logit_rows)
    logit_rows = logit_rows - p.frequency[:, None] * counts - p.presence[:, None] * (counts > 0)
    logits.index_copy_(0, p.rows, logit_rows)


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
