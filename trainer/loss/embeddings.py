"""`document_embeddings`: run a model on a packed batch, pool its hidden states per document.

hidden [1, T, H]   a a a | b b   ─▶   mean, first or last of each   ─▶   [2, H]
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...attention import Varlen, forward_context
from ...attention.hf import position_offset

Pooling = Literal["mean", "first", "last"]


def document_embeddings(model: Any, batch: dict[str, Any], pooling: Pooling = "mean") -> Tensor:
    """Return an embedding [N, H] of each document of a packed batch, with gradients.

    The model runs with `attn_implementation="nopad"`. The padding of a batch with fixed shapes
    counts as documents: ignore the rows after those of yours.

    Args:
        model: a model without a head, as `AutoModel` loads it.
        batch: a batch of `PackedCollator`; its labels are not used.
        pooling: "mean" of the tokens, "first" (BERT's CLS) or "last" token.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "nopad":
        raise ValueError(
            f"documents of a pack would see each other with {config._attn_implementation!r}: call "
            "model.set_attn_implementation('nopad')"
        )
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}
    inputs["position_ids"] = inputs["position_ids"] + position_offset(config)
    with forward_context(Varlen(batch["cu_seq_lens_q"], batch["max_length_q"]), model):
        hidden = model(**inputs).last_hidden_state
    return pool_documents(hidden, batch["cu_seq_lens_q"], pooling)


def pool_documents(hidden: Tensor, cu_seq_lens: Tensor, pooling: Pooling = "mean") -> Tensor:
    """Pool hidden states [1, T, H] to [N, H], one row for each document.

    Args:
        hidden: of the tokens of a pack.
        cu_seq_lens: [N + 1], the boundaries of its documents.
        pooling: "mean" of the tokens, "first" or "last" token.

    >>> hidden = torch.tensor([[[1.0], [3.0], [5.0]]])
    >>> pool_documents(hidden, torch.tensor([0, 2, 3])).tolist()
    [[2.0], [5.0]]
    """
    rows, bounds = hidden.flatten(0, 1), cu_seq_lens.long()
    if pooling == "first":
        return rows[bounds[:-1].clamp(max=len(rows) - 1)]  # fixed shapes have empty sequences
    if pooling == "last":
        return rows[bounds[1:] - 1]
    if pooling != "mean":
        raise ValueError(f"pooling={pooling!r}: choose mean, first or last")
    token = torch.arange(len(rows), device=rows.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    sums = rows.new_zeros(len(bounds) - 1, rows.shape[1]).index_add(0, document, rows)
    return sums / bounds.diff()[:, None].clamp(min=1)
