"""The residual stream between the products of a decode step: what a product left is added, normed.

    residual [M, N] + parts [S, M, N] ─▶ settle ─▶ residual, normed

The arithmetic is that of the modules it stands in for: float32 inside, rounded where those round.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _settle(
    x, parts, weight, total, out, eps, rows, width,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < width
    gain = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if LATE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * rows + row) * width + place
        delta += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    kind = total.dtype.element_ty
    value = (value + delta.to(kind).to(tl.float32)).to(kind)
    tl.store(total + row * width + place, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    rounded = (value * scale).to(kind).to(tl.float32)
    tl.store(out + row * width + place, rounded * gain, mask=inside)


def settle(
    x: Tensor, parts: Tensor, weight: Tensor, eps: float, late: bool
) -> tuple[Tensor, Tensor]:
    """The residual x [M, N] with the sum of parts [S, M, N] added, and the norm of that."""
    rows, width = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _settle[(rows,)](
        x, parts, weight, total, out, eps, rows, width, len(parts), block, late,
        num_warps=max(1, min(8, block // 256)), launch_pdl=late,
    )  # fmt: skip
    return total, out
