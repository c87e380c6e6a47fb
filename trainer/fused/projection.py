"""Linear layers as fused functions see them: with or without a LoRA adapter, in any dtype.

    out = x · Wᵀ + bias + scaling · (x · Aᵀ) · Bᵀ         A and B: the adapter, if there is one
              │                    └── low [T, r]
              └── W in the dtype of the products; under autocast W itself is often fp32

Layers of one input share the product with A; their input gradients are summed inside the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import cast_weight
from .class_swap import has_no_hooks, is_plain_linear

TENSORS_PER_PROJECTION = 4


@dataclass(frozen=True)
class Projection:
    """The tensors of one linear layer."""

    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias, self.lora_a, self.lora_b

    def cast(self, dtype: torch.dtype) -> Projection:
        tensors = (
            None if tensor is None else cast_weight(tensor, dtype) for tensor in self.tensors
        )
        return Projection(*tensors, scaling=self.scaling)  # pyright: ignore[reportArgumentType]


def read_projection(layer: Any) -> Projection | None:
    """Return the tensors of a plain linear layer or of PEFT's LoRA around one; None for others."""
    if is_plain_linear(layer):
        return Projection(layer.weight, layer.bias)
    return _read_lora(layer) if _is_lora_linear(layer) else None


def _is_lora_linear(layer: Any) -> bool:
    cls = type(layer)
    return cls.__name__ == "Linear" and cls.__module__ == "peft.tuners.lora.layer"


def _read_lora(layer: Any) -> Projection | None:
    """Return the tensors if exactly one adapter is added, without dropout, bias or variant."""
    base, active = layer.base_layer, layer.active_adapters
    if not (is_plain_linear(base) and has_no_hooks(layer)) or layer.merged:
        return None
    if layer.disable_adapters or len(active) != 1 or active[0] not in layer.lora_A:
        return None
    name = active[0]
    a, b = layer.lora_A[name], layer.lora_B[name]
    is_variant = name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name, False)
    is_plain = all(is_plain_linear(part) and part.bias is None for part in (a, b))
    drops_out = type(layer.lora_dropout[name]) is not nn.Identity
    if is_variant or drops_out or not is_plain:
        return None
    return Projection(base.weight, base.bias, a.weight, b.weight, layer.scaling[name])


def product_dtype(x: Tensor, projections: Sequence[Projection]) -> torch.dtype | None:
    """Return the dtype of the products; None where dtypes differ and autocast does not cast."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    tensors = (tensor for projection in projections for tensor in projection.tensors)
    return x.dtype if all(t is None or t.dtype == x.dtype for t in tensors) else None


def flatten(projections: Sequence[Projection]) -> list[Tensor | None]:
    return [tensor for projection in projections for tensor in projection.tensors]


def unflatten(tensors: Sequence[Tensor | None], scalings: Sequence[float]) -> list[Projection]:
    """Return the projections of tensors in the order of `flatten`."""
    size = TENSORS_PER_PROJECTION
    groups = (tensors[i : i + size] for i in range(0, len(tensors), size))
    return [Projection(*group, scaling=s) for group, s in zip(groups, scalings, strict=True)]  # pyright: ignore[reportArgumentType]


def forward_products(
    rows: Tensor, projections: Sequence[Projection]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the outputs for rows [T, in], and their products with all A [T, sum of ranks]."""
    joint_a = _joint_a(projections)
    low = None if joint_a is None else rows @ joint_a.T
    outs = [nn.functional.linear(rows, p.weight, p.bias) for p in projections]
    for out, p, columns in zip(outs, projections, _columns(projections), strict=True):
        if p.lora_b is not None and low is not None:
            out.addmm_(low[:, columns], p.lora_b.T, alpha=p.scaling)
    return outs, low


def low_rank_gradient(
    d_outs: Sequence[Tensor | None], projections: Sequence[Projection], low: Tensor | None
) -> Tensor | None:
    """Return the gradient of `low`."""
    if low is None:
        return None
    d_low = torch.zeros_like(low)
    for d, p, columns in zip(d_outs, projections, _columns(projections), strict=True):
        if d is not None and p.lora_b is not None:
            out = d_low[:, columns]
            torch.addmm(out, d, p.lora_b, beta=0, alpha=p.scaling, out=out)
    return d_low


def input_gradient(
    d_outs: Sequence[Tensor | None], projections: Sequence[Projection], d_low: Tensor | None
) -> Tensor | None:
    """Return the gradient of rows, summed inside the products."""
    d_rows, joint_a = None, _joint_a(projections)
    for d, weight in merge_adjacent(d_outs, [p.weight for p in projections]):
        d_rows = d @ weight if d_rows is None else d_rows.addmm_(d, weight)
    if d_rows is not None and d_low is not None and joint_a is not None:
        d_rows.addmm_(d_low, joint_a)
    return d_rows


def parameter_gradients(
    d_outs: Sequence[Tensor | None],
    d_low: Tensor | None,
    rows: Tensor | None,
    low: Tensor | None,
    projections: Sequence[Projection],
    dtypes: Sequence[torch.dtype | None],
) -> list[Tensor | None]:
    """Return a gradient for each dtype that is not None, in the order of `flatten`.

    A weight that is wider than the products gets its gradient from their fp32 sums, unrounded.
    """
    grads: list[Tensor | None] = []
    size = TENSORS_PER_PROJECTION
    for index, (d, p) in enumerate(zip(d_outs, projections, strict=True)):
        weight, bias, a, b = dtypes[index * size : (index + 1) * size]
        columns = _columns(projections)[index]
        grads += [
            _product(d, rows, weight),
            None if d is None or bias is None else d.sum(0, dtype=bias),
            _product(None if d is None or d_low is None else d_low[:, columns], rows, a),
            _product(d, None if low is None else low[:, columns], b, p.scaling),
        ]
    return grads


def _product(
    a: Tensor | None, b: Tensor | None, dtype: torch.dtype | None, scaling: float = 1.0
) -> Tensor | None:
    """Return scaling · aᵀ · b in `dtype`; None if anything is missing."""
    if a is None or b is None or dtype is None:
        return None
    if dtype == a.dtype:
        product = a.T @ b
    elif a.is_cuda and dtype == torch.float32:
        product = torch.mm(a.T, b, out_dtype=dtype)
    else:
        product = a.T.to(dtype) @ b.to(dtype)
    return product if scaling == 1.0 else product.mul_(scaling)


def _joint_a(projections: Sequence[Projection]) -> Tensor | None:
    parts = [p.lora_a for p in projections if p.lora_a is not None]
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)


def _columns(projections: Sequence[Projection]) -> list[slice]:
    """Return the columns of each projection's product with A.

    >>> a = torch.ones(4, 2)
    >>> _columns([Projection(a, lora_a=a), Projection(a), Projection(a, lora_a=a)])
    [slice(0, 4, None), slice(4, 4, None), slice(4, 8, None)]
    """
    columns, start = [], 0
    for projection in projections:
        rank = 0 if projection.lora_a is None else len(projection.lora_a)
        columns.append(slice(start, start + rank))
        start += rank
    return columns


def merge_adjacent(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs to multiply; gradients that are adjacent in memory become one matrix.

    >>> joint = torch.ones(2, 5)
    >>> pairs = merge_adjacent([joint[:, :3], joint[:, 3:]], [torch.ones(3, 4), torch.ones(2, 4)])
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
