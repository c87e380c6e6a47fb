"""Differentiable ops over torch's grouped_mm: rows sorted by expert, times their expert's weights.

    x [S, K]   rows of expert 0 | expert 1 | ...        offsets [E]: where each expert's rows end
    w [E, N, K]                                         y[s] = w[expert of s] @ x[s]

One launch for all experts, and no host synchronisation: how many rows an expert has stays on the
device.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


@torch.library.custom_op("nopad::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert [S, K] by its weights [E, N, K]; return [S, N].

    >>> x, w = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[5.0, 5.0]]])
    >>> grouped_mm(x, w, torch.tensor([2, 3], dtype=torch.int32)).flatten().tolist()
    [2.0, 2.0, 10.0]
    """
    if _has_kernel(x):
        return torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offsets)
    out = x.new_zeros(len(x), w.shape[1])
    for expert, rows in _groups(offsets):
        torch.mm(x[rows], w[expert].T, out=out[rows])
    return out


@grouped_mm.register_fake
def _(x, w, offsets):
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("nopad::grouped_outer", mutates_args=())
def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Sum the outer products of the rows of each expert: [S, N], [S, K] -> [E, N, K]."""
    if _has_kernel(a):
        return torch.nn.functional.grouped_mm(a.T, b, offs=offsets)
    out = a.new_zeros(len(offsets), a.shape[1], b.shape[1])
    for expert, rows in _groups(offsets):
        torch.mm(a[rows].T, b[rows], out=out[expert])
    return out


@grouped_outer.register_fake
def _(a, b, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _groups(offsets: Tensor) -> list[tuple[int, slice]]:
    ends = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(pairwise([0, *ends])) if b > a]


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, w, offsets = ctx.saved_tensors
    needs_x, needs_w, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    dx = grouped_mm(grad, w.transpose(1, 2), offsets) if needs_x else None
    return dx, grouped_outer(grad, x, offsets) if needs_w else None, None


grouped_mm.register_autograd(_backward, setup_context=_save)
