"""From logits to tokens, for all rows of a step at once and on their device.

    logits ─▶ bias, bans ─▶ penalties ─▶ temperature ─▶ top-k, top-p, min-p ─▶ draw

Each row is treated alone: what another row asks for never changes its token. The draw inverts the
cumulative distribution, in vocabulary order and float64, at a number the host made from
(seed, position). A row whose logits are not numbers, or to be drawn from infinite ones, yields
token -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from ...kernels import argmax
except ImportError:  # no Triton on this machine
    argmax = None


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Sums for single logits: bias, and minus infinity for banned tokens."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows whose earlier tokens count against them."""

    rows: Tensor
    history: Tensor
    """int64 [F, L]: prompt and output of each of the rows."""
    prompt_lengths: Tensor
    lengths: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Rows whose distribution is cut before the draw."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """How each row's token is to be chosen; None where no row asks for it."""

    edits: LogitEdits | None = None
    penalties: Penalties | None = None
    temperature: Tensor | None = None
    """[R]; 0 rows are greedy. None: all are."""
    uniform: Tensor | None = None
    """float64 [R] in [0, 1)."""
    filters: Filters | None = None


def sample(logits: Tensor, choice: SamplingInputs) -> Tensor:
    """Choose a token for each row of [R, V] logits; int64 [R], -1 where the row is not numbers."""
    if choice.edits is not None or choice.penalties is not None:
        logits = logits.float().clone()
    if choice.edits is not None:
        e = choice.edits
        logits.index_put_((e.rows, e.tokens), e.values, accumulate=True)
    if choice.penalties is not None:
        _penalise(logits, choice.penalties)
    token = _likeliest(logits)
    if choice.temperature is not None and choice.uniform is not None:
        token = torch.where(choice.temperature > 0, _draw(logits, choice), token)
    return token


def _likeliest(logits: Tensor) -> Tensor:
    """Token of each row's largest logit, -1 where the row is not numbers."""
    if logits.is_cuda and argmax is not None:
        return argmax(logits)
    best, token = logits.max(dim=-1)
    return torch.where(best.isnan(), -1, token)


def _draw(logits: Tensor, choice: SamplingInputs) -> Tensor:
    assert choice.temperature is not None and choice.uniform is not None
    heat = torch.where(choice.temperature > 0, choice.temperature, 1.0)
    scaled = logits.float() / heat[:, None]
    if choice.filters is not None:
        f = choice.filters
        scaled = scaled.index_copy(0, f.rows, _cut(scaled[f.rows], f))
    cdf = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below = cdf <= choice.uniform[:, None] * total
    token = below.sum(dim=-1).clamp_(max=logits.shape[-1] - 1)
    # Infinite logits, and rows in which every token is banned, have no distribution either.
    return torch.where(total[:, 0].isnan(), -1, token)


def _cut(scaled: Tensor, f: Filters) -> Tensor:
    """Set to minus infinity what top-k, top-p and min-p leave out; the likeliest token stays."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    k = torch.where(f.top_k > 0, f.top_k, scaled.shape[-1])
    ordered = ordered.masked_fill(rank >= k[:, None], -torch.inf)
    p = ordered.softmax(dim=-1)
    before = p.cumsum(dim=-1, dtype=torch.float64) - p
    drop = (before >= f.top_p[:, None]) & (f.top_p < 1)[:, None]
    drop |= p < f.min_p[:, None] * p[:, :1]
    drop |= rank >= k[:, None]
    drop[:, 0] = False
    return scaled.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)


def _penalise(logits: Tensor, p: Penalties) -> None:
    """Apply the three penalties to their rows, in place."""
    rows, vocabulary = logits[p.rows], logits.shape[-1]
    place = torch.arange(p.history.shape[1], device=logits.device)
    held = place < p.lengths[:, None]
    made = held & (place >= p.prompt_lengths[:, None])
    # A column past the vocabulary takes what is not part of a row's history.
    counts = rows.new_zeros(len(rows), vocabulary + 1)
    seen = counts.scatter(1, p.history.where(held, vocabulary), 1.0)[:, :-1] > 0
    counts.scatter_add_(1, p.history.where(made, vocabulary), made.to(rows.dtype))
    counts = counts[:, :-1]
    strength = p.repetition[:, None]
    rows = torch.where(seen, torch.where(rows > 0, rows / strength, rows * strength), rows)
    rows = rows - p.frequency[:, None] * counts - p.presence[:, None] * (counts > 0)
    logits.index_copy_(0, p.rows, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """What the model itself thinks of given tokens, before any sampling knob."""

    logprob: Tensor
    greedy: Tensor
    """Whether the token is the likeliest."""
    top_tokens: Tensor
    top_logprobs: Tensor


def gather_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-probabilities of one token per row, and of the `top` likeliest."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    best, place = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return Logprobs(
        chosen - total, chosen >= logits.max(dim=-1).values, place, best - total[:, None]
    )
