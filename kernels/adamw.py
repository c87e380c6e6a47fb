"""AdamW's update of one tensor, in a Triton kernel: everything is read once and written once."""

# Triton launches with what its kernels declare, plus settings of its own.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _update(
    param, gradient, mean, square, norm, count, max_norm, keep, rate, decay1, decay2, eps, root,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`keep`: what weight decay leaves; `rate` and `root` carry the bias corrections."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    share = max_norm / (tl.load(norm) + 1e-6)
    clip = tl.where(share > 1.0, 1.0, share)  # where the norm is no number, all become none
    g = tl.load(gradient + place, mask=inside).to(tl.float32) * clip
    p = tl.load(param + place, mask=inside).to(tl.float32) * keep
    m = tl.load(mean + place, mask=inside).to(tl.float32)
    s = tl.load(square + place, mask=inside).to(tl.float32)
    m += (1.0 - decay1) * (g - m)
    s = decay2 * s + (1.0 - decay2) * g * g
    p -= rate * m / (tl.sqrt(s) / root + eps)
    tl.store(param + place, p, mask=inside)
    tl.store(mean + place, m, mask=inside)
    tl.store(square + place, s, mask=inside)


def update(
    parameter: Tensor, state: dict[str, Any], norm: Tensor, max_norm: float, group: dict[str, Any]
) -> None:
    """Take one step of a parameter, in place, with its gradient clipped by `norm`."""
    gradient = parameter.grad
    assert gradient is not None
    if not parameter.numel():
        return
    step, (beta1, beta2) = state["step"].item(), group["betas"]
    _update[(triton.cdiv(parameter.numel(), BLOCK),)](
        parameter, gradient, state["exp_avg"], state["exp_avg_sq"], norm, parameter.numel(),
        max_norm, 1.0 - group["lr"] * group["weight_decay"], group["lr"] / (1.0 - beta1**step),
        beta1, beta2, group["eps"], (1.0 - beta2**step) ** 0.5, BLOCK,
    )  # fmt: skip
