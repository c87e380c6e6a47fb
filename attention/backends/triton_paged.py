"""Our own paged kernels in Triton: any page size from 16, graph-safe, every score rule.

A step is at most three launches: decodes (and the joining of their splits), then everything with several
queries. Each kernel skips what is the other's on the device, so the host needs no lengths.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from ..varlen import Varlen
from .ask import Ask, Scores

try:
    from .triton_decode import DecodeTiles, decode, padded
    from .triton_prefill import PrefillTiles, prefill
except ImportError:  # no Triton on this machine: `why_not` says so
    decode = prefill = None


def why_not(ask: Ask) -> str | None:
    if decode is None:
        return "triton is not installed"
    if not ask.paged:
        return "it reads pages only"
    if ask.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs TRITON_INTERPRET=1"
    if max(ask.key_dim, ask.value_dim) > 256:
        return f"head dim {max(ask.key_dim, ask.value_dim)} is over 256"
    if ask.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {ask.dtype} products"
    return None


def packed(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    raise NotImplementedError("the Triton kernels read pages only")


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: Scores) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None and decode is not None and prefill is not None
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    where = (varlen.cu_seqlens, pages.table, pages.lengths, scores, out)
    reach = pages.max_length if scores.window is None else min(scores.window, pages.max_length)
    decode(q, keys, values, *where, decode_tiles(q, keys, values, pages.table.shape[0], reach))
    if varlen.max_length > 1:
        prefill(q, keys, values, *where, prefill_tiles(q, keys, values))
    return out


def decode_tiles(q: Tensor, keys: Tensor, values: Tensor, count: int, reach: int) -> DecodeTiles:
    """Enough programs to fill the device several times over, none without a block of keys."""
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    block = 64 if wide <= 256 else 32
    rows = max(16, q.shape[1] // keys.shape[2])
    if rows > 32:
        block = min(block, 32)
    wanted = -(-8 * _processors(q.device) // (count * keys.shape[2]))
    splits = 1
    while splits < wanted and splits < 32 and splits * 2 * block <= max(reach, block):
        splits *= 2
    return DecodeTiles(block, splits, warps=4, stages=3 if wide <= 256 else 2)


def prefill_tiles(q: Tensor, keys: Tensor, values: Tensor) -> PrefillTiles:
    """Tall tiles for tensor cores; smaller ones where wide heads or fp32 fill the shared memory."""
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    group = q.shape[1] // keys.shape[2]
    rows = max(128 if wide <= 256 else 64, group)
    return PrefillTiles(rows, 64 if wide <= 256 else 32, warps=8 if rows > 64 else 4, stages=2)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
