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
from .call_spec import CallSpec, ScoreParams

try:
    import triton

    from ...kernels.paged_decode import LEAST_SHARE, DecodeTiles, decode, padded, programs_at_once
    from ...kernels.paged_prefill import PrefillTiles, prefill
except ImportError:  # `unsupported_reason` says so
    triton = None


def unsupported_reason(spec: CallSpec) -> str | None:
    if triton is None:
        return "triton is not installed"
    if spec.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs TRITON_INTERPRET=1"
    if max(spec.key_dim, spec.value_dim) > 256:
        return f"head dim {max(spec.key_dim, spec.value_dim)} is over 256"
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} products"
    return None


def paged(q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams) -> Tensor:
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
    """Blocks of 16 KiB of keys, in programs of which exactly four fit a processor.

    Measured on an H200: where more would fit, they crowd on some processors and leave others idle.
    Sequences may be split up to twice as many as run at once; beyond that, programs follow each
    other anyway, and finding shares costs what it gains. Many rows or wide heads need registers.
    """
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    block, registers = 128 if wide <= 128 else 64, 128
    if q.shape[1] // keys.shape[2] > 16 or wide > 256:
        block, registers = 32, None
    room = programs_at_once(keys.shape[2], q.device)
    splits = 1
    while count <= 2 * room and splits * 2 <= min(room, 64, reach // LEAST_SHARE):
        splits *= 2
    return DecodeTiles(block, splits, warps=4, stages=2, registers=registers)


def prefill_tiles(q: Tensor, keys: Tensor, values: Tensor) -> PrefillTiles:
    """Tall tiles for tensor cores, as large as registers hold: spilling makes them crawl."""
    wide = max(padded(q.shape[2]), padded(values.shape[-1])) * q.element_size()
    group = q.shape[1] // keys.shape[2]
    rows = max(128 if wide <= 128 else 64, group)
    if wide <= 256:
        return PrefillTiles(rows, 64, warps=4 if rows * wide <= 16384 else 8, stages=3)
    return PrefillTiles(rows, 32, warps=4, stages=2)
