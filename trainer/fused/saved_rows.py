"""The tensors kept for the backward of products; their input is kept by its source.

residual ─▶ norm ─▶ rows ─▶ product        the norm's backward keeps the residual anyway, so the
   └─────▶ norm ─▶ rows, again             product's backward normalizes it again: a third of the
                                           time of a residual add, and the rows need not be kept
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .projection import TENSORS_PER_PROJECTION, Projection, flatten, unflatten

Tensors = Sequence[Tensor | None]

SOURCE = "_nopad_normed_rows"
"""Attribute of a normalized tensor: its source, and the versions of both at that time."""


@dataclass(frozen=True)
class NormedRows:
    """The RMSNorm of a residual."""

    residual: Tensor
    gain: Tensor
    eps: float
    dtype: torch.dtype
    is_recomputed: bool = False
    """Whether its layer is recomputed in the backward, so that nothing large should be kept."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.residual, self.gain

    @property
    def settings(self) -> tuple[float, torch.dtype]:
        return self.eps, self.dtype

    def rows(self) -> Tensor:
        """Normalize again, to rows [T, width]: the same kernel, so the same values."""
        from ...kernels import rms_norm

        return rms_norm(self.residual, self.gain, self.eps, self.dtype).flatten(0, -2)


def note_source(x: Tensor, source: NormedRows) -> None:
    """Record the source of a normalized tensor, if there will be a backward."""
    if x.requires_grad:
        setattr(x, SOURCE, (source, _versions(x, source)))


def find_source(x: Tensor, dtype: torch.dtype) -> NormedRows | None:
    """Return the source of a normalized tensor of this dtype; None if there is none, or either
    was changed in place since.
    """
    noted = getattr(x, SOURCE, None)
    if noted is None or x.dtype != dtype:
        return None
    source, versions = noted
    return source if _versions(x, source) == versions else None


def _versions(x: Tensor, source: NormedRows) -> tuple[int, int]:
    return x._version, source.residual._version


def save_products(
    ctx: Any,
    x: Tensor,
    rows: Tensor,
    source: NormedRows | None,
    projections: Sequence[Projection],
    tensors: Tensors,
    kept: Tensors = (),
    needs_rows: bool = False,
) -> None:
    """Save for the backward of a function of (x, source, projections, *tensors).

    rows: x [T, width] in the dtype of the products; saved for gradients of weights, or if
        `needs_rows`, by its source if it has one.
    tensors: those of the projections as they are stored; their dtypes are those of the gradients.
    """
    pairs = zip(ctx.needs_input_grad[3:], tensors, strict=True)
    ctx.dtypes = [tensor.dtype if w and tensor is not None else None for w, tensor in pairs]
    ctx.shape, ctx.scalings = x.shape, tuple(p.scaling for p in projections)
    ctx.source = source and source.settings
    first: Tensors = (None, None)
    if needs_rows or any(dtype is not None for dtype in ctx.dtypes):
        first = (rows, None) if source is None else source.tensors
    ctx.save_for_backward(*first, *flatten(projections), *kept)


def saved_products(ctx: Any) -> tuple[Tensor | None, list[Projection], tuple[Tensor | None, ...]]:
    """Return the rows, the projections in the dtype of the products, and the other tensors kept."""
    rows, gain, *tensors = ctx.saved_tensors
    if rows is not None and ctx.source is not None:
        rows = NormedRows(rows, gain, *ctx.source).rows()
    size = len(ctx.scalings) * TENSORS_PER_PROJECTION
    return rows, unflatten(tensors[:size], ctx.scalings), tuple(tensors[size:])
