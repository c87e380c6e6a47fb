"""flash-attn 2: packed training rows, and pages whose size is a multiple of 256.

The package itself, or its prebuilt build through `kernels` where that is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..varlen import Varlen
from . import flash_library
from .call_spec import CallSpec, ScoreParams

_flash: Any = None


def _load() -> str | None:
    """Find the library; return why there is none."""
    global _flash
    _flash, missing = flash_library.find("flash_attn", "kernels-community/flash-attn2")
    return missing


def why_not(ask: CallSpec) -> str | None:
    limit = flash_library.why_not(ask)
    if limit is not None:
        return limit
    if ask.value_dim > ask.key_dim or (ask.paged and ask.value_dim != ask.key_dim):
        return f"value dim {ask.value_dim} beside key dim {ask.key_dim}"
    if ask.page_size % 256:
        return f"pages of {ask.page_size} are no multiple of 256"
    return _load()


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    wide = q.shape[-1] - v.shape[-1]
    bounds = varlen.cu_seqlens
    # torch.compile cannot trace an autograd function that is given one tensor twice.
    key_bounds = bounds.clone() if torch.compiler.is_compiling() else bounds
    out = _flash.flash_attn_varlen_func(
        q,
        k,
        F.pad(v, (0, wide)) if wide else v,
        bounds,
        key_bounds,
        varlen.max_length,
        varlen.max_length,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **flash_library.rule(scores),
    )
    return out[..., : v.shape[-1]] if wide else out


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    rule = {**flash_library.rule(scores), "block_table": pages.table}
    if varlen.max_length == 1 and q.shape[0] == pages.table.shape[0]:
        out = _flash.flash_attn_with_kvcache(
            q[:, None], keys, values, cache_seqlens=pages.lengths, **rule
        )
        return out[:, 0]
    ends = F.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    lengths = (varlen.cu_seqlens, ends, varlen.max_length, pages.max_length)
    return _flash.flash_attn_varlen_func(q, keys, values, *lengths, **rule)
