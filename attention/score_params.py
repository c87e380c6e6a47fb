"""`ScoreParams`: scale, sliding window, softcap and sinks of an attention call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
