"""Refuse wrong attention calls: masks, dropout, caches, long sequences, sequence classifiers."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from ..varlen import Varlen
from .mask_patch import joins_image_tokens
from .model_types import refuse_states
from .sequence_limits import sequence_limit

UNPACKED_FORWARD = "unpacked_forward"
"""Name of a forward that splits the hidden states of packs into rows before the head sees them."""


def check_not_sliced(cu_seq_lens: Tensor, rows: int) -> None:
    """Refuse boundaries that were sliced to one entry per row; the values are not read."""
    if cu_seq_lens.shape[0] <= rows:
        raise ValueError(
            f"cu_seq_lens was cut to {cu_seq_lens.shape[0]} of its entries: Accelerate's prepare, "
            "which a stock Trainer calls too, slices it like a row of the batch; use "
            "PackedAccelerateLoader, PackedTrainer or PackedDataModule of nopad.trainer for packs"
        )


def check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Raise if the result would silently differ from the model's."""
    name = type(module).__name__
    if mask is not None and not joins_image_tokens(mask):
        raise ValueError(
            f"{name}: attn_implementation='nopad' takes no attention_mask; pack instead"
        )
    if dropout:
        raise ValueError(f"{name}: attention dropout {dropout} is not supported; set it to 0")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name}: {key.shape[2]} keys for {query.shape[2]} queries: 'nopad' keeps earlier keys "
            "in pages; call the model with use_cache=False, or generate through nopad.inference"
        )
    for extra in ("position_bias", "block_indices"):
        if kwargs.get(extra) is not None:
            raise ValueError(f"{name}: {extra} is not supported by 'nopad'")


def check_model(module: nn.Module, varlen: Varlen, rows: int, layer: int) -> None:
    """Refuse packs in a sequence classifier: it would return one result for all documents of a row.

    No argument of the call says what the model is, so the forwards that led here are looked at.
    """
    if varlen.pages is not None or varlen.cu_seqlens.shape[0] <= rows + 1:
        return
    refuse_states(getattr(module, "config", None))
    frame = sys._getframe(1) if layer == 0 else None
    while frame is not None and frame.f_code.co_qualname != UNPACKED_FORWARD:
        if frame.f_code.co_qualname.endswith("ForSequenceClassification.forward"):
            raise ValueError(
                "a sequence classifier gives one row of logits for all documents of a pack: train "
                "it with a trainer of nopad.trainer, or call attach_loss(model) first"
            )
        frame = frame.f_back


def check_lengths(module: nn.Module, varlen: Varlen) -> None:
    """Refuse sequences beyond the model's limit, among others or at all.

    Decodes are not checked: CUDA graphs round the number of keys up, and the engine's max_model_len
    holds them.
    """
    limit = sequence_limit(getattr(module, "config", None))
    if limit is None or (varlen.pages is not None and varlen.max_length == 1):
        return
    longest = varlen.max_length if varlen.pages is None else varlen.pages.max_length
    is_alone = varlen.cu_seqlens.shape[0] == 2 and varlen.pages is None
    if longest > limit.length and not (limit.alone and is_alone):
        raise ValueError(
            f"a sequence of up to {longest} tokens{' among others' * limit.alone} cannot be run by "
            f"'nopad' in this model ({type(module).__name__}), because {limit.reason}: "
            f"keep sequences (with fixed shapes: max_length) within {limit.length} tokens"
        )
