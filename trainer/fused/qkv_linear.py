"""Products of one input, as one operation: the gradients that meet at the input meet in a product.

x ─┬─ q      d x = d q · Wq + d k · Wk + d v · Wv     added up inside the second product and
   ├─ k                                               the third, with no pass over memory for
   └─ v                                               each sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import alone


class _Products(torch.autograd.Function):
    """Of x's rows: a result must be no view, or it could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Any) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows, pairs = x.flatten(0, -2), zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(rows, w, b) for w, b in pairs)

    @staticmethod
    @alone
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        wants_weight, wants_bias = wants[: len(weights)], wants[len(weights) :]
        rows = x.flatten(0, -2)
        d_x = None
        for d, weight in _merged(d_outs, weights) if wants_x else ():
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


def _merged(
    gradients: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs to multiply and add up; gradients that lie side by side are one matrix.

    >>> both = torch.ones(2, 5)
    >>> pairs = _merged([both[:, :3], both[:, 3:]], [torch.ones(3, 4), torch.ones(2, 4)])
    >>> [(tuple(d.shape), tuple(w.shape)) for d, w in pairs]
    [((2, 5), (5, 4))]
    """
    pairs: list[tuple[Tensor, list[Tensor]]] = []
    for d, weight in zip(gradients, weights, strict=True):
        if d is None:
            continue
        if pairs and _beside(pairs[-1][0], d):
            left, ws = pairs.pop()
            d = left.as_strided((len(d), left.shape[1] + d.shape[1]), left.stride())
            pairs.append((d, [*ws, weight]))
        else:
            pairs.append((d, [weight]))
    return [(d, ws[0] if len(ws) == 1 else torch.cat(ws)) for d, ws in pairs]


def _beside(left: Tensor, right: Tensor) -> bool:
    """Whether every row of one goes on in the other's."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    behind = right.storage_offset() == left.storage_offset() + left.shape[1]
    wide = left.stride(0) >= left.shape[1] + right.shape[1]
    return same and behind and wide and left.stride() == right.stride() and left.stride(1) == 1


def joint_products(x: Tensor, parts: list[nn.Linear]) -> tuple[Tensor, ...]:
    """Return what each linear layer makes of x."""
    inputs = (x, *(part.weight for part in parts), *(part.bias for part in parts))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(None if tensor is None else tensor.to(dtype) for tensor in inputs)
    made: Any = _Products.apply(*inputs)
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in made)
