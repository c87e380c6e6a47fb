"""Products of one input, as one operation: the gradients that meet at the input meet in a product.

x ─┬─ q      d x = d q · Wq + d k · Wk + d v · Wv     added up inside the second product and
   ├─ k                                               the third, with no pass over memory for
   └─ v                                               each sum
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        pairs = zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(x, w, b) for w, b in pairs if w is not None)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        wants_weight, wants_bias = wants[: len(weights)], wants[len(weights) :]
        rows = x.flatten(0, -2)
        d_flat = [None if d is None else d.flatten(0, -2) for d in d_outs]
        d_x = None
        for d, weight in zip(d_flat, weights, strict=True):
            if wants_x and d is not None:
                d_x = d @ weight if d_x is None else d_x.addmm_(d, weight)
        d_weights = [
            d.T @ rows if wanted and d is not None else None
            for d, wanted in zip(d_flat, wants_weight, strict=True)
        ]
        d_biases = [
            d.sum(0) if wanted and d is not None else None
            for d, wanted in zip(d_flat, wants_bias, strict=True)
        ]
        return None if d_x is None else d_x.view_as(x), *d_weights, *d_biases


def joint_products(x: Tensor, parts: list[nn.Linear]) -> tuple[Tensor, ...]:
    """Return what each linear layer makes of x."""
    inputs = (x, *(part.weight for part in parts), *(part.bias for part in parts))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(None if tensor is None else tensor.to(dtype) for tensor in inputs)
    outs: Any = _Products.apply(*inputs)
    return outs
