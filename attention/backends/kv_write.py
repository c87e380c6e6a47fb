"""Write a step's keys and values into their slots of the cache."""

from __future__ import annotations

from torch import Tensor

try:
    from ...kernels.kv_write import write_slots
except ImportError:  # no Triton on this machine
    write_slots = None


def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put k [T, Hkv, Dk], v [T, Hkv, Dv] into slot numbers [T] of a layer; -1 is not written."""
    if keys.is_cuda and write_slots is not None:
        write_slots(k, v, keys, values, slots)
        return
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    for rows, cache in ((k, keys), (v, values)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows.to(cache.dtype))
