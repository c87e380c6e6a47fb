"""flash-attn 2: packed training rows, and pages whose size is a multiple of 256.

The package itself, or its prebuilt build through `kernels` where that is installed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..score_params import ScoreParams
from ..varlen import Varlen
from . import flash_library
from .call_spec import CallSpec

LIBRARY = ("flash_attn", "kernels-community/flash-attn2")


def unsupported_reason(spec: CallSpec) -> str | None:
    limit = flash_library.declared_limit(spec)
    if limit is not None:
        return limit
    if spec.value_dim > spec.key_dim or (spec.paged and spec.value_dim != spec.key_dim):
        return f"value dim {spec.value_dim} differs from key dim {spec.key_dim}"
    if spec.page_size % 256:
        return f"the page size {spec.page_size} is not a multiple of 256"
    return flash_library.find(*LIBRARY)[1]


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    flash, _ = flash_library.find(*LIBRARY)
    padding = q.shape[-1] - v.shape[-1]
    cu_seqlens = varlen.cu_seqlens
    # torch.compile cannot trace an autograd function that is given one tensor twice.
    cu_seqlens_k = cu_seqlens.clone() if torch.compiler.is_compiling() else cu_seqlens
    out = flash.flash_attn_varlen_func(
        q,
        k,
        F.pad(v, (0, padding)) if padding else v,
        cu_seqlens,
        cu_seqlens_k,
        varlen.max_length,
        varlen.max_length,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **flash_library.score_kwargs(score_params),
    )
    return out[..., : v.shape[-1]] if padding else out


def paged(
    q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, score_params: ScoreParams
) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    flash, _ = flash_library.find(*LIBRARY)
    pages = varlen.pages
    assert pages is not None
    kwargs = {**flash_library.score_kwargs(score_params), "block_table": pages.table}
    if varlen.max_length == 1 and q.shape[0] == pages.table.shape[0]:
        out = flash.flash_attn_with_kvcache(
            q[:, None], keys, values, cache_seqlens=pages.lengths, **kwargs
        )
        return out[:, 0]
    cu_seqlens_k = F.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    bounds = (varlen.cu_seqlens, cu_seqlens_k, varlen.max_length, pages.max_length)
    return flash.flash_attn_varlen_func(q, keys, values, *bounds, **kwargs)
