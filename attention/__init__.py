"""Attention shared by training and inference: one value, `Varlen`, and one function, `attend`.

Varlen, Pages ─▶ attend ─▶ backends/ (flash-attn, cuDNN, torch, Triton, SDPA)
                   ▲
any HF causal LM ──┘  attn_implementation="nopad", registered by importing this package
"""

from .attend import attend, attend_cached
from .hf.call_log import check_every_layer
from .hf.forward_context import forward_context
from .hf.interface import register
from .hf.mask_patch import document_mask
from .hf.model_support import (
    check_supported,
    layer_shapes,
    not_causal_lm_reason,
    step_context,
    unsupported_reason,
)
from .paging.allocator import PageAllocator
from .paging.cache import PagedCache
from .reference import causal_mask
from .varlen import Pages, Varlen

__all__ = [
    "PageAllocator",
    "PagedCache",
    "Pages",
    "Varlen",
    "attend",
    "attend_cached",
    "causal_mask",
    "check_every_layer",
    "check_supported",
    "document_mask",
    "forward_context",
    "layer_shapes",
    "not_causal_lm_reason",
    "register",
    "step_context",
    "unsupported_reason",
]

register()
