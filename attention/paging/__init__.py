"""The paged KV cache: its tensors, the allocator of its pages, the index of cached prefixes."""

from .allocator import PageAllocator, PageCopy, PrefixHit
from .cache import PagedCache
from .prefix import STRIDE

__all__ = [
    "STRIDE",
    "PageAllocator",
    "PageCopy",
    "PagedCache",
    "PrefixHit",
]
