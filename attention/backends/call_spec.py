"""What a backend is asked: `CallSpec` and `ScoreParams` of a call, and the protocol `Backend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..varlen import Varlen


@dataclass(frozen=True, slots=True, eq=False)
class ScoreParams:
    """What is applied to the product of a query and a key before and inside the softmax."""

    scale: float
    window: int | None = None
    """Number of keys a query sees, itself included; None: all of its sequence."""
    softcap: float | None = None
    """c in c * tanh(score / c)."""
    sinks: Tensor | None = None
    """[H]: one more logit per head, which takes weight and has no value."""

    def __post_init__(self) -> None:
        if not self.scale > 0:  # the maximum is taken before the scale is applied
            raise ValueError(f"scale is {self.scale}: the factor of attention scores is positive")

    @property
    def scale_only(self) -> bool:
        """Whether scores are plain causal scores: no window, softcap or sinks."""
        return self.window is None and self.softcap is None and self.sinks is None


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
