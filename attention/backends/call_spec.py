"""`CallSpec`: what selects the backend of a call; `ScoreParams`: scale, window, softcap, sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..varlen import Varlen

_LARGE_TOKENS = 8192
_MAX_PADDING = 64
"""Maximum padded tokens per real token for cuDNN, with all sequences padded to the longest allowed:
its backward allocates a float per head and padded position, a gigabyte a layer for many empty
sequences."""


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
    causal: bool = True
    """Whether a query sees no later key; otherwise a window extends to both sides."""

    def __post_init__(self) -> None:
        if not self.scale > 0:  # the maximum is taken before the scale is applied
            raise ValueError(f"scale is {self.scale}: the factor of attention scores is positive")

    @property
    def scale_only(self) -> bool:
        """Whether scores have no window, softcap or sinks."""
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
    causal: bool = True
    quantized: torch.dtype | None = None
    """The 8-bit dtype of the keys and values in the pages; None: that of the queries."""

    @property
    def paged(self) -> bool:
        return self.page_size > 0


def call_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_params: ScoreParams,
    varlen: Varlen,
    grad: bool | None = None,
) -> CallSpec:
    """Describe a call for the selection of a backend.

    grad: whether gradients are needed; by default, whether one of q, k and v requires them.
    """
    page_size = 0 if varlen.pages is None else k.shape[1]
    if page_size and not score_params.causal:
        raise ValueError("attention over pages is causal: run encoders without pages")
    # Any of the three: with an adapter on the values alone, queries have no gradient.
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    if grad is None:
        grad = torch.is_grad_enabled() and not page_size and requires_grad
    tokens, padded = q.shape[0], len(varlen.cu_seqlens) * varlen.max_length
    large = not page_size and tokens >= _LARGE_TOKENS and padded <= _MAX_PADDING * tokens
    return CallSpec(
        q.device.type,
        q.dtype,
        q.shape[1],
        k.shape[-2],
        q.shape[2],
        v.shape[-1],
        grad,
        score_params.window is not None,
        score_params.softcap is not None,
        score_params.sinks is not None,
        page_size,
        page_size > 0 and varlen.max_length == 1,
        large,
        score_params.causal,
        k.dtype if k.dtype.itemsize == 1 else None,
    )


class NotCapturable(RuntimeError):
    """A backend reads lengths on the host, so its calls cannot be captured in a CUDA graph."""
