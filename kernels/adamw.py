"""AdamW's update of one tensor with gradient clipping: each value is read and written once."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _update_kernel(
    param, grad, exp_avg, exp_avg_sq, grad_norm, numel, max_norm, decay, step_size, beta1, beta2,
    eps, bias_correction,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`decay`: the factor of weight decay; `bias_correction`: that of the second moment's root."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    ratio = max_norm / (tl.load(grad_norm) + 1e-6)
    clip = tl.where(ratio > 1.0, 1.0, ratio)  # a NaN norm makes every value NaN, as in torch
    g = tl.load(grad + offs, mask=mask).to(tl.float32) * clip
    p = tl.load(param + offs, mask=mask).to(tl.float32) * decay
    m = tl.load(exp_avg + offs, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + offs, mask=mask).to(tl.float32)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p -= step_size * m / (tl.sqrt(v) / bias_correction + eps)
    tl.store(param + offs, p, mask=mask)
    tl.store(exp_avg + offs, m, mask=mask)
    tl.store(exp_avg_sq + offs, v, mask=mask)


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad_norm: Tensor,
    *,
    max_norm: float,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its moments in place; the gradient is clipped by the total norm."""
    if not param.numel():
        return
    beta1, beta2 = betas
    _update_kernel[(triton.cdiv(param.numel(), BLOCK),)](
        param, grad, exp_avg, exp_avg_sq, grad_norm, param.numel(), max_norm,
        1.0 - lr * weight_decay, lr / (1.0 - beta1**step), beta1, beta2, eps,
        (1.0 - beta2**step) ** 0.5, BLOCK,
    )  # fmt: skip
