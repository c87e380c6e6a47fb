"""What a call needs of a backend, and how its scores are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..varlen import Varlen


@dataclass(frozen=True, slots=True, eq=False)
class ScoreParams:
    """From the product of query and key to the weight of a value."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but the scale is asked for."""
        return self.window is None and self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The facts of a call that decide whether a backend can serve it."""

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
    """0: the keys are this step's own tokens."""
    decode: bool
    """One query per sequence, over pages."""
    many: bool = False
    """Thousands of tokens, in not too many places: the device's time counts, not the host's."""

    @property
    def paged(self) -> bool:
        return self.page_size > 0


class NotCapturable(RuntimeError):
    """A backend looks at lengths on the host, so its calls cannot be captured."""


class Backend(Protocol):
    """What a backend's module offers; `packed` or `paged` is left out where it has none."""

    def why_not(self, ask: CallSpec) -> str | None:
        """Say why a call cannot be served, as far as that is known without trying."""

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scores: ScoreParams
    ) -> Tensor:
        """Attend to this step's own keys; differentiable."""
        ...

    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, varlen: Varlen, scores: ScoreParams
    ) -> Tensor:
        """Attend to all keys in the pages of one layer, this step's among them."""
        ...
