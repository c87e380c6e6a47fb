"""How much arithmetic a training step must do, counted from the model's shape.

    matrices   6 FLOPs per weight that a token meets (2 forward, 4 backward)
    attention  12 FLOPs per query head, head dimension and pair of query and key of one sequence

Attention is counted per sequence, with its causal half and its window: counting T x T would praise
packing for work that it does not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

STATED_PEAKS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s by the vendors' data sheets, by a part of the device's name."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward; `of` a step's sequence lengths.

    >>> ModelFlops(per_token=10.0, per_pair=2.0, windows=(None,)).of([3])
    42.0
    """

    per_token: float
    per_pair: float
    """Of one layer, for one query and key that see each other."""
    windows: tuple[int | None, ...]
    """The sliding window of each attention layer, None where it sees everything."""

    @classmethod
    def of_model(cls, model: Any) -> ModelFlops:
        """Read the shape of a HF causal LM."""
        config: Any = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        return cls(6.0 * _weights_per_token(model, config), 12.0 * heads * width, _windows(config))

    def of(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Count a step over sequences of these lengths."""
        lengths = np.asarray(lengths, np.float64)
        pairs = sum(_pairs(lengths, window) for window in self.windows)
        return float(self.per_token * lengths.sum() + self.per_pair * pairs)


def _pairs(lengths: np.ndarray, window: int | None) -> float:
    """Count the (query, key) pairs that causal attention computes.

    >>> _pairs(np.array([3.0]), None), _pairs(np.array([3.0]), 2)
    (6.0, 5.0)
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * seen).sum())


def _windows(config: Any) -> tuple[int | None, ...]:
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        everywhere = window if getattr(config, "use_sliding_window", True) else None
        return (everywhere,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _weights_per_token(model: Any, config: Any) -> float:
    """Count the matrix weights that a token meets: embeddings are looked up, not multiplied."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    visited = getattr(config, "num_experts_per_tok", None)
    share = visited / experts if experts and visited else 1.0
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in tables:
            routed = ".experts." in name
            total += parameter.numel() * (share if routed else 1.0)
    head = model.get_output_embeddings()
    if head is not None and id(head.weight) in tables:
        total += head.weight.numel()
    return total


def stated_peak(device: torch.device) -> float | None:
    """Return the bf16 FLOP/s on the device's data sheet, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in STATED_PEAKS.items() if part in name), None)
