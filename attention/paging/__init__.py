"""The paged KV cache: its tensors, the allocator of its pages, the index of cached prefixes."""

from .allocator import Copy, Hit, PageAllocator
from .cache import PagedCache
from .prefix import STRIDE

__all__ = [
    "STRIDE",
    "Copy",
    "Hit",
    "PageAllocator",
    "PagedCache",
]
