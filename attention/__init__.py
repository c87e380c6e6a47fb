"""Attention shared by training and inference: one value, `Varlen`, and one function, `attend`.

Varlen, Pages ─▶ attend ─▶ backends/ (flash-attn, torch, Triton, SDPA)
                   ▲
any HF causal LM ──┘  attn_implementation="nopad", registered by importing this package
"""

from .allocator import PageAllocator
from .attend import attend, attend_written
from .cache import PagedCache
from .carried import carry
from .documents import keep_apart
from .proof import expect_layers
from .registration import register
from .supported import probe_layers, refuse, why_refused
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
    "why_refused",
]

register()
