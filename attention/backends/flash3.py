"""flash-attn 3, on Hopper: packed training rows, and pages of any size.

Not tested by us: none of our machines has it. It is used only if its trial call agrees with the
reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..score_params import ScoreParams
from ..varlen import Varlen
from . import flash_library
from .call_spec import CallSpec

LIBRARY = ("flash_attn_interface", "kernels-community/flash-attn3")


def unsupported_reason(spec: CallSpec) -> str | None:
    limit = flash_library.declared_limit(spec)
    if limit is None and torch.cuda.get_device_capability()[0] != 9:
        limit = "it needs a Hopper GPU"
    return limit or flash_library.find(*LIBRARY)[1]


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    flash, _ = flash_library.find(*LIBRARY)
    bounds = (varlen.cu_seqlens, varlen.cu_seqlens, varlen.max_length, varlen.max_length)
    deterministic = torch.are_deterministic_algorithms_enabled()
    kwargs = flash_library.score_kwargs(score_params)
    return _output(
        flash.flash_attn_varlen_func(q, k, v, *bounds, deterministic=deterministic, **kwargs)
    )


def paged(
    q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, score_params: ScoreParams
) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    flash, _ = flash_library.find(*LIBRARY)
    pages = varlen.pages
    assert pages is not None
    return _output(
        flash.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=pages.lengths,
            page_table=pages.table,
            cu_seqlens_q=varlen.cu_seqlens,
            max_seqlen_q=varlen.max_length,
            **flash_library.score_kwargs(score_params),
        )
    )


def _output(result: Any) -> Tensor:
    """Older builds return the output and the log-sum-exp."""
    return result[0] if isinstance(result, tuple) else result
