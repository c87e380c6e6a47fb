"""`Backend`: the functions that a backend's module defines; `padded_to`, to pad head dims."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ..varlen import Varlen
from .call_spec import CallSpec, ScoreParams


class Backend(Protocol):
    """The functions of a backend's module; one without `packed` or `paged` omits it."""

    def limit_reason(self, spec: CallSpec) -> str | None:
        """Return the declared limit that rules a call out; None if there is none."""

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
    ) -> Tensor:
        """Attend to the keys of this step; differentiable."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
    ) -> tuple[Tensor, Tensor]:
        """Attend like `packed`, without autograd; return T * H numbers for `backward` as well."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        varlen: Varlen,
        score_params: ScoreParams,
    ) -> tuple[Tensor, ...]:
        """Return contiguous gradients of q, k and v, and of the sinks if it has them.

        out, lse: what `forward` returned; `lse` flat.
        """
        ...

    def paged(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        varlen: Varlen,
        score_params: ScoreParams,
        *scales: Tensor,
    ) -> Tensor:
        """Attend to all keys in the pages of one layer, including those of this step.

        scales: those of keys and values that have 8 bits.
        """
        ...


def padded_to(x: Tensor, q: Tensor) -> Tensor:
    """Pad the head dim of x to that of q, for kernels that take one head dim."""
    padding = q.shape[-1] - x.shape[-1]
    return F.pad(x, (0, padding)) if padding else x
