"""Apply sampling parameters to logits: bias, bans, penalties, temperature, top-k, top-p, min-p."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scheduling.step import Filters, Penalties, SamplingInputs


def process_logits(
    logits: Tensor, inputs: SamplingInputs[Tensor], token_history: Tensor | None = None
) -> Tensor:
    """Return the logits [S, V] of the distributions that `sample` samples from."""
    return scale_logits(edit_logits(logits, inputs, token_history), inputs)


def edit_logits(
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


def scale_logits(logits: Tensor, inputs: SamplingInputs[Tensor]) -> Tensor:
    """Divide by the temperature and apply top-k, top-p and min-p; greedy rows keep their logits."""
    if inputs.temperature is None:
        return logits
    temperature = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)
    scaled = logits.float() / temperature[:, None]
    if inputs.filters is not None:
        f = inputs.filters
        scaled = scaled.index_copy(0, f.rows, _filter_logits(scaled[f.rows], f))
    return scaled


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
