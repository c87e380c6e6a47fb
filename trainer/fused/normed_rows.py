"""Normalized hidden states by what they were computed from.

residual ─▶ norm ─▶ rows ─▶ product        the norm's backward keeps the residual anyway, so the
   └─────▶ norm ─▶ rows, again             product's backward normalizes it again: a third of the
                                           time of a residual add, and the rows need not be kept
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SOURCE = "_nopad_normed_rows"
"""Attribute of a normalized tensor: what it was computed from, and the versions of both then."""


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
    """Remember what a normalized tensor was computed from, if there will be a backward."""
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
