"""Backend `triton`: our attention kernels for pages of any size from 16, safe in CUDA graphs.

A step launches at most three kernels: decode, the combination of its splits, and prefill. Each
skips the other's sequences on the device, so the host needs no lengths.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..varlen import Varlen
from .call_spec import CallSpec, ScoreParams

try:
    from ...kernels import (
        MIN_SPLIT_KEYS,
        DecodeTiles,
        PrefillTiles,
        padded_dim,
        paged_attention_decode,
        paged_attention_prefill,
        programs_per_kv_head,
    )

    _has_triton = True
except ImportError:  # `limit_reason` reports it
    _has_triton = False


def limit_reason(spec: CallSpec) -> str | None:
    if not _has_triton:
        return "triton is not installed"
    if spec.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs TRITON_INTERPRET=1"
    if max(spec.key_dim, spec.value_dim) > 256:
        return f"head dim {max(spec.key_dim, spec.value_dim)} is over 256"
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {spec.dtype} products"
    return None


def paged(
    q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams, *scales: Tensor
) -> Tensor:
    """Attend each sequence to the keys in its pages."""
    pages = varlen.pages
    assert pages is not None
    q = q if q.stride(-1) == 1 else q.contiguous()  # the kernels read heads as contiguous rows
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    tensors = (q, keys, values, varlen.cu_seqlens, pages.table, pages.lengths, out)
    options = {
        "scale": scores.scale,
        "window": scores.window,
        "softcap": scores.softcap,
        "sinks": scores.sinks,
        "scales": scales,
    }
    max_keys = pages.max_length if scores.window is None else min(scores.window, pages.max_length)
    tiles = decode_tiles(q, keys, values, pages.table.shape[0], max_keys)
    paged_attention_decode(*tensors, tiles, **options)
    if varlen.max_length > 1:
        paged_attention_prefill(*tensors, prefill_tiles(q, keys, values), **options)
    return out


def decode_tiles(
    q: Tensor, keys: Tensor, values: Tensor, num_seqs: int, max_keys: int
) -> DecodeTiles:
    """Return blocks of 16 KiB of keys, in programs of which exactly four fit on an SM.

    Measured on an H200: if more programs fit, they crowd on some SMs and leave others idle. A batch
    may be split into up to twice as many programs as run at once; beyond that programs queue
    anyway, and computing the splits costs more than it gains. Many rows or wide heads need more
    registers.
    """
    row_bytes = max(padded_dim(q.shape[2]), padded_dim(values.shape[-1])) * q.element_size()
    block_n, max_registers = 128 if row_bytes <= 128 else 64, 128
    if q.shape[1] // keys.shape[2] > 16 or row_bytes > 256:
        block_n, max_registers = 32, None
    num_programs = programs_per_kv_head(keys.shape[2], q.device)
    limit = min(num_programs, 64, max_keys // MIN_SPLIT_KEYS)
    max_splits = 1
    while num_seqs <= 2 * num_programs and max_splits * 2 <= limit:
        max_splits *= 2
    num_stages = 3 if keys.element_size() == 1 else 2  # blocks of half the bytes
    return DecodeTiles(block_n, max_splits, 4, num_stages, max_registers)


def prefill_tiles(q: Tensor, keys: Tensor, values: Tensor) -> PrefillTiles:
    """Return tall tiles for the tensor cores, as large as registers hold: spilling is slow.

    Products in fp32 do not run on them and need more registers: tiles are small and square there.
    """
    dim = max(padded_dim(q.shape[2]), padded_dim(values.shape[-1]))
    row_bytes = dim * q.element_size()
    group_size = q.shape[1] // keys.shape[2]
    if q.dtype == torch.float32:
        side = 32 if dim <= 128 else 16
        return PrefillTiles(max(side, group_size), side, num_warps=4, num_stages=2)
    block_m = max(128 if row_bytes <= 128 else 64, group_size)
    if row_bytes <= 256:
        num_warps = 4 if block_m * row_bytes <= 16384 else 8
        return PrefillTiles(block_m, 64, num_warps=num_warps, num_stages=3)
    return PrefillTiles(block_m, 32, num_warps=4, num_stages=2)
