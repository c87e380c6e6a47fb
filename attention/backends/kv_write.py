"""Write a step's keys and values into the cache: by our kernel on a GPU, else by torch."""

from __future__ import annotations

from torch import Tensor

from .quantized_pages import write_quantized

try:
    from ...kernels import write_kv
except ImportError:  # Triton is not installed
    write_kv = None


def write(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *scales: Tensor
) -> None:
    """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] into KV slots [T] of a layer; -1: skip the token."""
    if keys.is_cuda and write_kv is not None:
        write_kv(k, v, keys, values, slots, *scales)
        return
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    if scales:
        write_quantized(k, v, keys, values, slots, *scales)
        return
    for rows, cache in ((k, keys), (v, values)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows.to(cache.dtype))
