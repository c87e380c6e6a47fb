"""`attn_implementation="nopad"`: Transformers calls `attend`, for packed rows and for pages alike.

    model(**batch)                      cu_seq_lens_q, max_length_q of the collator    training
    model(ids, positions, varlen=...)   a Varlen, with or without pages                 the engine

Being paged travels with the call, not with the model: nothing on the model has to be set back.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils

from ..attend import attend
from ..backends import cudnn_ragged
from ..varlen import Varlen
from . import mask_patch
from .call_log import record_call
from .forward_context import current_varlen

NAME = "nopad"


def register() -> None:
    """Make Transformers know the name; done when `nopad.attention` is imported."""
    AttentionInterface.register(NAME, attention)
    mask_patch.install(masking_utils, NAME)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    varlen: Varlen | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend as Transformers' attention interface asks: (B, H, T, D) in, (B, T, H, Dv) out."""
    _refuse(module, query, key, attention_mask, dropout, is_causal, unused)
    if cu_seq_lens_q is None:  # of self-attention, the keys' are the queries'
        cu_seq_lens_q, max_length_q = unused.get("cu_seq_lens_k"), unused.get("max_length_k")
    if varlen is None and cu_seq_lens_q is not None:
        varlen = Varlen(_whole(cu_seq_lens_q, query.shape[0]), _longest(max_length_q, query))
    if varlen is None:
        varlen = current_varlen()
    source = "call"
    if varlen is None:
        varlen, source = _guess(query, position_ids)
    layer = 0
    if varlen.pages is not None or not torch.compiler.is_compiling():
        # Read only where it matters: it would make a compiled layer another graph than its twins.
        layer = int(getattr(module, "layer_idx", 0))
    if not torch.compiler.is_compiling():
        record_call(layer, source, (key.shape[1], key.shape[3], value.shape[3]))
        if layer == 0:
            cudnn_ragged.forget()  # a new batch, perhaps in the buffer of the one before
    _within_chunk(module, varlen)
    rows, columns = query.shape[0], query.shape[2]
    q, k, v = (_flat(x) for x in _one_dtype(query, key, value))
    out = attend(
        q,
        k,
        v,
        varlen,
        layer=layer,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.view(rows, columns, *out.shape[1:]), None


def _flat(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B*T, H, D); a view where the layer made (B, T, H, D) before."""
    return x.transpose(1, 2).flatten(0, 1)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings in fp32 leave q and k wider than v; autocast narrows products' inputs."""
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _whole(cu_seq_lens: Tensor, rows: int) -> Tensor:
    """Refuse boundaries that were cut off, to an entry a row; no host waits for their values."""
    if cu_seq_lens.shape[0] <= rows:
        raise ValueError(
            f"cu_seq_lens was cut to {cu_seq_lens.shape[0]} of its entries: Accelerate's prepare, "
            "which a stock Trainer calls too, slices it like a row of the batch; use "
            "PackedAccelerateLoader, PackedTrainer or PackedDataModule of nopad.trainer for packs"
        )
    return cu_seq_lens


def _longest(max_length: int | None, query: Tensor) -> int:
    return query.shape[0] * query.shape[2] if max_length is None else int(max_length)


_guessed: tuple[weakref.ref[Tensor], tuple[int, int], Varlen] | None = None
"""For the layers after the first: looking at positions makes the host wait for the device."""


def _guess(query: Tensor, position_ids: Tensor | None) -> tuple[Varlen, str]:
    """Without metadata: a sequence is a row, or ends where its positions do not go on by one."""
    global _guessed
    rows, columns = query.shape[0], query.shape[2]
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != columns:
        cu_seqlens = torch.arange(0, rows * columns + 1, columns, dtype=torch.int32)
        return Varlen(cu_seqlens.to(query.device), columns), "rows"
    if position_ids.is_inference():  # no version to tell whether it was written since
        return _by_positions(position_ids.expand(rows, -1), query.device), "positions"
    key = (rows, position_ids._version)
    if _guessed is None or _guessed[0]() is not position_ids or _guessed[1] != key:
        varlen = _by_positions(position_ids.expand(rows, -1), query.device)
        _guessed = weakref.ref(position_ids), key, varlen
    return _guessed[2], "positions"


def _by_positions(position_ids: Tensor, device: torch.device) -> Varlen:
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    edges = [*starts.flatten().nonzero().flatten().tolist(), position_ids.numel()]
    longest = max(b - a for a, b in pairwise(edges))
    return Varlen(torch.tensor(edges, dtype=torch.int32, device=device), longest)


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    unused: dict[str, Any],
) -> None:
    """Raise where the result would silently be another than the model's."""
    name = type(module).__name__
    if mask is not None:
        raise ValueError(
            f"{name}: attn_implementation='nopad' takes no attention_mask; pack instead"
        )
    if dropout:
        raise ValueError(f"{name}: attention dropout {dropout} is not supported; set it to 0")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name}: attention that is not causal is not supported by 'nopad'")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name}: {key.shape[2]} keys for {query.shape[2]} queries: 'nopad' keeps earlier keys "
            "in pages; call the model with use_cache=False, or generate through nopad.inference"
        )
    for extra in ("position_bias", "block_indices"):
        if unused.get(extra) is not None:
            raise ValueError(f"{name}: {extra} is not supported by 'nopad'")


def _within_chunk(module: nn.Module, varlen: Varlen) -> None:
    """Chunked attention equals causal attention inside one chunk; beyond it, refuse."""
    config = getattr(module, "config", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if not chunk or not kinds:
        return
    layer = int(getattr(module, "layer_idx", 0))
    if kinds[layer] != "chunked_attention":
        return
    longest = varlen.max_length if varlen.pages is None else varlen.pages.max_length
    if longest > chunk:
        raise ValueError(
            f"layer {layer} attends in chunks of {chunk} and a sequence may have {longest} keys: "
            "only sequences within one chunk are supported"
        )
