"""Our own paged kernels in Triton: any page size from 16, graph-safe, every score rule.

A step is at most three launches: decodes, the joining of their splits, everything with several
queries. Each kernel skips what is another's on the device, so the host needs no lengths.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..varlen import Varlen
from .ask import Ask, Scores

try:
    import triton

    from .triton_decode import DecodeTiles, decode, padded, processors
    from .triton_prefill import PrefillTiles, prefill
except ImportError:  # `why_not` says so
    triton = None


def why_not(ask: Ask) -> str | None:
    if triton is None:
        return "triton is not installed"
    if ask.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs TRITON_INTERPRET=1"
    if max(ask.key_dim, ask.value_dim) > 256:
        return f"head dim {max(ask.key_dim, ask.value_dim)} is over 256"
    if ask.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {ask.dtype} products"
    return None


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernels read heads as unbroken rows
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    where = (varlen.cu_seqlens, pages.table, pages.lengths, scores, out)
    reach = pages.max_length if scores.window is None else min(scores.window, pages.max_length)
    decode(q, keys, values, *where, decode_tiles(q, keys, values, pages.table.shape[0], reach))
    if varlen.max_length > 1:
        prefill(q, keys, values, *where, prefill_tiles(q, keys, values))
    return out


def decode_tiles(q: Tensor, keys: Tensor, values: Tensor, count: int, reach: int) -> DecodeTiles:
    """Split sequences until each processor has four programs, all of them running at once.

    Found by measuring on an H200: with more, a second round of programs and the joining of more
    parts cost what is gained. Many rows or wide heads need their registers for the sums.
    """
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    group = q.shape[1] // keys.shape[2]
    if group > 16 or wide > 256:
        block, warps, stages, registers = 32, 4, 2, None
    elif wide > 128:
        block, warps, stages, registers = 32, 2, 3, None
    else:
        block, warps, stages, registers = 128, 4, 2, 128
    wanted = 4 * processors(q.device) // (count * keys.shape[2])
    splits = 1
    while splits * 2 <= min(wanted, 64, reach // block):
        splits *= 2
    return DecodeTiles(block, splits, warps, stages, registers)


def prefill_tiles(q: Tensor, keys: Tensor, values: Tensor) -> PrefillTiles:
    """Tall tiles for tensor cores, as large as registers hold: spilling makes them crawl."""
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    group = q.shape[1] // keys.shape[2]
    rows = max(128 if wide <= 128 else 64, group)
    if wide <= 256:
        return PrefillTiles(rows, 64, warps=4 if rows * wide <= 16384 else 8, stages=3)
    return PrefillTiles(rows, 32, warps=4, stages=2)
