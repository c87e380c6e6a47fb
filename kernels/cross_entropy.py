"""The two Triton kernels of the loss: a row of logits becomes its own gradient; a tensor is scaled.

    logits[row] ─▶ running maximum and sum ─▶ loss[row]
         └──────── read again, still in the cache ─▶ gradient, written over the logits

A row is one program's work, so that its second reading finds it in the cache.
"""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packing import IGNORE_INDEX


@triton.jit
def _row_loss(
    logits, targets, weights, losses, width, row_stride, smoothing, z_loss,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    place = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        for start in range(0, width, BLOCK):
            tl.store(at + start + place, tl.zeros([BLOCK], tl.float32), mask=start + place < width)
        return
    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, width, BLOCK):
        inside = start + place < width
        x = tl.load(at + start + place, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
        plain += tl.sum(tl.where(inside, x, 0.0))
        top = higher
    normalizer = top + tl.log(total)
    picked = tl.load(at + target).to(tl.float32)
    loss = normalizer - (1 - smoothing) * picked - smoothing * plain / width
    tl.store(losses + row, loss + z_loss * normalizer * normalizer)
    tl.debug_barrier()  # the target's logit is read before anyone overwrites it
    weight = tl.load(weights + row)
    rise = weight * (1 + 2 * z_loss * normalizer)
    everywhere, there = weight * smoothing / width, weight * (1 - smoothing)
    for start in range(0, width, BLOCK):
        inside = start + place < width
        x = tl.load(at + start + place, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = rise * tl.exp(x - normalizer) - everywhere
        gradient -= tl.where(start + place == target, there, 0.0)
        tl.store(at + start + place, gradient, mask=inside)


def losses_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z_loss: float
) -> Tensor:
    """Return the losses of a chunk, and overwrite its logits by the gradient of their sum."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    width = logits.shape[1]
    block = min(4096, triton.next_power_of_2(width))
    _row_loss[(len(logits),)](
        logits, targets, weights, losses, width, logits.stride(0), smoothing, z_loss,
        IGNORE_INDEX, block, num_warps=4,
    )  # fmt: skip
    return losses


@triton.jit
def _scale(x, by, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * tl.load(by)
    tl.store(out + place, value, mask=inside)


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by a number on the device: in fp32, rounded once, in one pass."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _scale[(triton.cdiv(x.numel(), 4096),)](x, by, out, x.numel(), 4096)
    return out
