"""flash-attn 3, on Hopper: packed training rows, and pages of any size.

Not tested by us: no machine of ours carries it. It is used only where its trial call agrees with
the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..varlen import Varlen
from . import flash_library
from .call_spec import CallSpec, ScoreParams

_flash: Any = None


def _load() -> str | None:
    """Find the library; return why there is none."""
    global _flash
    _flash, missing = flash_library.find("flash_attn_interface", "kernels-community/flash-attn3")
    return missing


def why_not(ask: CallSpec) -> str | None:
    limit = flash_library.why_not(ask)
    if limit is None and torch.cuda.get_device_capability()[0] != 9:
        limit = "it needs a Hopper GPU"
    return limit or _load()


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    longest = varlen.max_length
    lengths = (varlen.cu_seqlens, varlen.cu_seqlens, longest, longest)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _only(
        _flash.flash_attn_varlen_func(
            q, k, v, *lengths, deterministic=deterministic, **flash_library.rule(scores)
        )
    )


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    return _only(
        _flash.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=pages.lengths,
            page_table=pages.table,
            cu_seqlens_q=varlen.cu_seqlens,
            max_seqlen_q=varlen.max_length,
            **flash_library.rule(scores),
        )
    )


def _only(result: Any) -> Tensor:
    """Older builds return the log-sum-exp beside the output."""
    return result[0] if isinstance(result, tuple) else result
