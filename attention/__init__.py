"""Attention shared by training and inference: one value, `Varlen`, and one function, `attend`.

Varlen, Pages ─▶ attend ─▶ backends/ (flash-attn, torch, Triton, SDPA)
                   ▲
any HF causal LM ──┘  attn_implementation="nopad", registered by importing this package
"""

from .attend import attend, attend_written
from .hf.call_log import expect_layers
from .hf.forward_context import carry
from .hf.interface import register
from .hf.mask_patch import keep_apart
from .hf.model_support import probe_layers, refuse, why_refused
from .paging.allocator import PageAllocator
from .paging.cache import PagedCache
from .reference import visible
from .varlen import Pages, Varlen

__all__ = [
    "PageAllocator",
    "PagedCache",
    "Pages",
    "Varlen",
    "attend",
    "attend_written",
    "carry",
    "expect_layers",
    "keep_apart",
    "probe_layers",
    "refuse",
    "register",
    "visible",
    "why_refused",
]

register()
