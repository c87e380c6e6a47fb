"""flash-attn 2: packed training rows, and pages whose size is a multiple of 256.

The package itself, or its prebuilt build through `kernels` where that is installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..varlen import Varlen
from .backend import padded_to
from .call_spec import CallSpec, ScoreParams
from .forward_backward import attend_by_backward
from .sinks import add_sinks, sinks_gradient

_found: list[tuple[Any, str | None]] = []
"""The result of `library`. A list, not `functools.cache`: torch.compile traces a lookup, and would
trace through the cache into the import."""


def library() -> tuple[Any, str | None]:
    """Return the library, or None and why there is none; loaded once per process."""
    if not _found:
        _found.append(_load())
    return _found[0]


def _load() -> tuple[Any, str | None]:
    try:
        return importlib.import_module("flash_attn"), None
    except Exception as error:  # a build for another torch may raise anything
        reason = f"flash_attn is not installed ({type(error).__name__}: {error})"
    try:
        from kernels import get_kernel

        return get_kernel("kernels-community/flash-attn2"), None
    except Exception:
        return None, reason


def limit_reason(spec: CallSpec) -> str | None:
    if spec.device != "cuda":
        return "it needs CUDA"
    if spec.quantized:
        return "it reads no pages in 8 bits"
    if spec.sinks and spec.paged:
        return "it has no sinks over pages"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} kernels"
    if spec.key_dim > 256 or spec.key_dim % 8:
        return f"head dim {spec.key_dim} is over 256 or not a multiple of 8"
    if spec.value_dim > spec.key_dim or (spec.paged and spec.value_dim != spec.key_dim):
        return f"value dim {spec.value_dim} differs from key dim {spec.key_dim}"
    if spec.page_size % 256:
        return f"the page size {spec.page_size} is not a multiple of 256"
    return library()[1]


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams) -> Tensor:
    """Attend inside each sequence of a packed row."""
    if score_params.sinks is not None:
        return attend_by_backward(sys.modules[__name__], q, k, v, varlen, score_params)
    return _attend(q, k, v, varlen, score_params)[..., : v.shape[-1]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
) -> tuple[Tensor, Tensor]:
    """Attend like `packed`, without autograd; return the log-sum-exp [H, T] as well."""
    out, lse, _ = _attend(q, k, v, varlen, score_params, return_attn_probs=True)
    return add_sinks(out[..., : v.shape[-1]], lse, score_params.sinks)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    varlen: Varlen,
    score_params: ScoreParams,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, and of the sinks if there are any."""
    flash, _ = library()
    lse = lse.view(q.shape[1], -1)
    grad_, v_, out_ = (padded_to(x, q) for x in (grad, v, out))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v_))
    kwargs = _score_kwargs(score_params)
    window = kwargs.pop("window_size")
    flash.flash_attn_interface._flash_attn_varlen_backward(
        *(grad_, q, k, v_, out_, lse, dq, dk, dv),
        *(varlen.cu_seqlens, varlen.cu_seqlens, varlen.max_length, varlen.max_length),
        dropout_p=0.0,
        window_size_left=window[0],
        window_size_right=window[1],
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **kwargs,
    )
    dv = dv[..., : v.shape[-1]].contiguous()
    if score_params.sinks is None:
        return dq, dk, dv
    return dq, dk, dv, sinks_gradient(grad, out, lse, score_params.sinks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams, **kwargs: Any
) -> Any:
    flash, _ = library()
    bounds = (varlen.cu_seqlens, varlen.cu_seqlens, varlen.max_length, varlen.max_length)
    return flash.flash_attn_varlen_func(
        *(q, k, padded_to(v, q), *bounds),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_score_kwargs(score_params),
        **kwargs,
    )


def paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    varlen: Varlen,
    score_params: ScoreParams,
    *scales: Tensor,
) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    flash, _ = library()
    pages = varlen.pages
    assert pages is not None and not scales
    kwargs = {**_score_kwargs(score_params), "block_table": pages.table}
    if varlen.max_length == 1 and q.shape[0] == pages.table.shape[0]:
        out = flash.flash_attn_with_kvcache(
            q[:, None], keys, values, cache_seqlens=pages.lengths, **kwargs
        )
        return out[:, 0]
    cu_seqlens_k = F.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    bounds = (varlen.cu_seqlens, cu_seqlens_k, varlen.max_length, pages.max_length)
    return flash.flash_attn_varlen_func(q, keys, values, *bounds, **kwargs)


def _score_kwargs(score_params: ScoreParams) -> dict[str, Any]:
    """Return the library's keyword arguments for these score parameters."""
    window = score_params.window
    after = 0 if window is None or score_params.causal else window - 1
    return {
        "softmax_scale": score_params.scale,
        "causal": score_params.causal,
        "window_size": (-1, -1) if window is None else (window - 1, after),
        "softcap": score_params.softcap or 0.0,
    }
