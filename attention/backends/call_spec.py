"""`CallSpec`, the key of backend selection, and `Backend`, the protocol of a backend module."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..score_params import ScoreParams
from ..varlen import Varlen


class CallSpec(NamedTuple):
    """The properties of a call that decide whether a backend can serve it.

    A tuple, because one is built and looked up in every attention call.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    grad: bool
    window: bool
    softcap: bool
    sinks: bool
    page_size: int
    """0: the keys are the tokens of this step."""
    decode: bool
    """One query per sequence, over pages."""
    large: bool = False
    """Thousands of tokens with little padding: device time decides, not host time."""

    @property
    def paged(self) -> bool:
        return self.page_size > 0


class NotCapturable(RuntimeError):
    """A backend reads lengths on the host, so its calls cannot be captured in a CUDA graph."""


class Backend(Protocol):
    """The functions of a backend's module; one without `packed` or `paged` omits it."""

    def unsupported_reason(self, spec: CallSpec) -> str | None:
        """Return the declared limit that rules a call out; None if there is none."""

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, score_params: ScoreParams
    ) -> Tensor:
        """Attend to the keys of this step; differentiable."""
        ...

    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, score_params: ScoreParams
    ) -> Tensor:
        """Attend to all keys in the pages of one layer, including those of this step."""
        ...
