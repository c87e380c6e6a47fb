"""Triton kernels for the products of a decode step: few rows, so the weights' way is what counts.

    x [M, K] ─▶ product ─▶ parts [S, M, N] ─▶ summed by whoever reads them next
    x [M, K] ─▶ gated   ─▶ silu(x Wg) * (x Wu)

A product of few rows has few tiles; sharing out K as well fills the device, and the parts are added
up in a fixed order. A kernel is launched while the one before it still runs, and waits for it only
when it is ready to read (programmatic dependent launch).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut; found by measuring.

    Weights are the tall operand: their tile is a multiple of 64, the rows' may be small.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int = 4


@triton.jit(do_not_specialize=["count"])
def _product(
    x, weight, out, count, columns, width, x_stride, share,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    split = tl.program_id(1)
    k = tl.arange(0, K)
    inside = (m < count)[:, None]
    row = tl.minimum(n, columns - 1).to(tl.int64)
    from_x = x + m[:, None] * x_stride + k[None, :]
    from_w = weight + row[:, None] * width + k[None, :]
    acc = tl.zeros([N, M], tl.float32)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(split * share, split * share + share, K):
        w = tl.load(from_w + start)
        a = tl.load(from_x + start, mask=inside, other=0.0)
        acc = tl.dot(w, a.T, acc)
    to = out + (split * count + m[:, None]) * columns + n[None, :]
    kept = inside & (n < columns)[None, :]
    tl.store(to, acc.T.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["count"])
def _gated(
    x, gate, up, out, count, columns, width, x_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    inside = (m < count)[:, None]
    row = tl.minimum(n, columns - 1).to(tl.int64)
    left = tl.zeros([N, M], tl.float32)
    right = tl.zeros([N, M], tl.float32)
    from_x = x + m[:, None] * x_stride + k[None, :]
    from_gate = gate + row[:, None] * width + k[None, :]
    from_up = up + row[:, None] * width + k[None, :]
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, width, K):
        a = tl.load(from_x + start, mask=inside, other=0.0)
        g = tl.load(from_gate + start)
        u = tl.load(from_up + start)
        left = tl.dot(g, a.T, left)
        right = tl.dot(u, a.T, right)
    kind = out.dtype.element_ty
    value = left.to(kind).to(tl.float32)
    value = (value / (1.0 + tl.exp(-value))).to(kind).to(tl.float32)
    value = (value * right.to(kind).to(tl.float32)).to(kind)
    to = out + m[:, None] * columns + n[None, :]
    tl.store(to, value.T, mask=inside & (n < columns)[None, :])
