"""`attn_implementation="nopad"`: Transformers calls `attend`, for packed rows and for pages.

    model(**batch)                      cu_seq_lens_q, max_length_q of the collator    training
    model(ids, positions, varlen=...)   a Varlen, with or without pages                 the engine

Pages travel with the call, not with the model: nothing on the model has to be restored.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attend import attend
from ..image_spans import attend_image_spans
from ..varlen import Varlen, batch_cache, start_batch
from .call_check import check_call, check_lengths, check_model, check_not_sliced
from .call_log import record_call
from .forward_context import current_varlen
from .mask_patch import ATTN_IMPLEMENTATION, refuse_mask
from .model_types import is_vision
from .step_attention import STEP, step_attention


def register() -> None:
    """Register the name with Transformers; importing `nopad.attention` does it."""
    AttentionInterface.register(ATTN_IMPLEMENTATION, attention)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, refuse_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    varlen: Varlen | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through Transformers' attention interface: (B, H, T, D) in, (B, T, H, Dv) out."""
    if is_vision(getattr(module, "config", None)):  # the boundaries are those of the text
        kwargs |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    check_call(module, query, key, attention_mask, dropout, kwargs)
    if cu_seq_lens_q is None:  # in self-attention, keys and queries have the same boundaries
        cu_seq_lens_q, max_length_q = kwargs.get("cu_seq_lens_k"), kwargs.get("max_length_k")
    if varlen is None and cu_seq_lens_q is not None:
        check_not_sliced(cu_seq_lens_q, query.shape[0])
        longest = query.shape[0] * query.shape[2] if max_length_q is None else max_length_q
        varlen = Varlen(cu_seq_lens_q, longest if is_in_graph(longest) else int(longest))
    if varlen is None:
        varlen = current_varlen(module)
    params: Any = {"window": _window(module, kwargs), "softcap": softcap, "sinks": s_aux}
    params["scale"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    if varlen is STEP:
        return step_attention(*flat_heads(query, key, value), **params)[None], None
    compiling, layer, source = torch.compiler.is_compiling(), 0, "call"
    paged = varlen is not None and varlen.pages is not None
    if paged or not compiling:
        # Read only if it is needed: it would give every compiled layer a graph of its own.
        layer = int(getattr(module, "layer_idx", 0))
    if layer == 0 and not compiling:
        start_batch(position_ids, None if varlen is None else varlen.cu_seqlens)
    if varlen is None:
        varlen, source = _infer_varlen(query, position_ids)
    if not compiling and record_call(layer, source, (key.shape[1], key.shape[3], value.shape[3])):
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3]), None
    if layer == 0 and not is_in_graph(varlen.max_length):  # compiled layers all read 0
        check_lengths(module, varlen)
    rows, columns = query.shape[0], query.shape[2]
    if not compiling:
        check_model(module, varlen, rows, layer)
    params["causal"] = _is_causal(module, is_causal)
    q, k, v = flat_heads(query, key, value)
    out = attend(q, k, v, varlen, layer=layer, **params)
    if attention_mask is not None:  # which tokens of images see the next one
        out = attend_image_spans(out, q, k, v, varlen, attention_mask, params)
    return out.view(rows, columns, *out.shape[1:]), None


def flat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, T, D) -> (B*T, H, D) of one dtype: views, if the layer transposed a (B, T, H, D).

    Rotary embeddings in fp32 leave q and k wider than v; autocast casts inputs of products.
    """
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return q, k, v


def is_in_graph(max_length: Any) -> bool:
    """Whether a longest sequence is a value of a graph: compiled layers pass a tensor, not read."""
    return isinstance(max_length, Tensor) and torch.compiler.is_compiling()


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Return whether tokens do not see later ones: the call or the layer says that they do."""
    return (getattr(module, "is_causal", True) if is_causal is None else is_causal) is not False


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the sliding window; layers of Qwen2-MoE have one, but leave it to the stock mask."""
    return kwargs.get("sliding_window", getattr(module, "sliding_window", None))


def _infer_varlen(query: Tensor, position_ids: Tensor | None) -> tuple[Varlen, str]:
    """Without metadata, a sequence is a row, or ends where positions do not continue by one.

    Reading positions makes the host wait for the device, so the layers after the first reuse it.
    """
    rows, columns = query.shape[0], query.shape[2]
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != columns:
        cu_seqlens = torch.arange(0, rows * columns + 1, columns, dtype=torch.int32)
        return Varlen(cu_seqlens.to(query.device), columns), "rows"
    derived = {} if torch.compiler.is_compiling() else batch_cache(position_ids)
    key = f"varlen of {rows} rows"
    if key not in derived:
        derived[key] = _varlen_of_positions(position_ids.expand(rows, -1), query.device)
    return derived[key], "positions"


def _varlen_of_positions(position_ids: Tensor, device: torch.device) -> Varlen:
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    bounds = [*starts.flatten().nonzero().flatten().tolist(), position_ids.numel()]
    max_length = max(end - start for start, end in pairwise(bounds))
    return Varlen(torch.tensor(bounds, dtype=torch.int32, device=device), max_length)
