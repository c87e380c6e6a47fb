"""Several linear layers of one input as one operation, whose input gradient is summed in products.

x ─┬─ q      d_x = d_q · Wq + d_k · Wk + d_v · Wv     the sums are accumulated inside the second
   ├─ k                                               and third product: no pass over memory
   └─ v                                               for each of them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .once_differentiable import no_double_backward


class _QKVLinear(torch.autograd.Function):
    """Returns 2-D tensors: autograd forbids in-place changes of views returned here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Any) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows, pairs = x.flatten(0, -2), zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(rows, w, b) for w, b in pairs)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        wants_weight, wants_bias = wants[: len(weights)], wants[len(weights) :]
        rows = x.flatten(0, -2)
        d_x = None
        for d, weight in _merge_adjacent(d_outs, weights) if wants_x else ():
            d_x = d @ weight if d_x is None else d_x.addmm_(d, weight)
        d_weights = [
            d.T @ rows if wanted and d is not None else None
            for d, wanted in zip(d_outs, wants_weight, strict=True)
        ]
        d_biases = [
            d.sum(0) if wanted and d is not None else None
            for d, wanted in zip(d_outs, wants_bias, strict=True)
        ]
        return None if d_x is None else d_x.view_as(x), *d_weights, *d_biases


def _merge_adjacent(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs to multiply; gradients that are adjacent in memory become one matrix.

    >>> joint = torch.ones(2, 5)
    >>> pairs = _merge_adjacent([joint[:, :3], joint[:, 3:]], [torch.ones(3, 4), torch.ones(2, 4)])
    >>> [(tuple(d.shape), tuple(w.shape)) for d, w in pairs]
    [((2, 5), (5, 4))]
    """
    pairs: list[tuple[Tensor, list[Tensor]]] = []
    for d, weight in zip(grads, weights, strict=True):
        if d is None:
            continue
        if pairs and _are_adjacent(pairs[-1][0], d):
            left, ws = pairs.pop()
            d = left.as_strided((len(d), left.shape[1] + d.shape[1]), left.stride())
            pairs.append((d, [*ws, weight]))
        else:
            pairs.append((d, [weight]))
    return [(d, ws[0] if len(ws) == 1 else torch.cat(ws)) for d, ws in pairs]


def _are_adjacent(left: Tensor, right: Tensor) -> bool:
    """Whether each row of `right` follows the same row of `left` in memory."""
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    follows = right.storage_offset() == left.storage_offset() + left.shape[1]
    fits = left.stride(0) >= left.shape[1] + right.shape[1]
    same_stride = left.stride() == right.stride() and left.stride(1) == 1
    return same_storage and follows and fits and same_stride


def qkv_linear(x: Tensor, linears: list[nn.Linear]) -> tuple[Tensor, ...]:
    """Return the output of each linear layer for x."""
    inputs = (x, *(linear.weight for linear in linears), *(linear.bias for linear in linears))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(None if tensor is None else tensor.to(dtype) for tensor in inputs)
    outputs: Any = _QKVLinear.apply(*inputs)
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outputs)
