"""FLOPs of a training step; peak bf16 FLOP/s of a GPU; whether a CPU has bf16 instructions.

    matrices   6 FLOPs per weight and token (2 forward, 4 backward)
    attention  12 FLOPs per query head, head dimension and (query, key) pair of one sequence

Both follow from the model's shape and the sequence lengths. Attention is counted per sequence, with
the causal half and the sliding window: counting T x T would credit packing with work that it does
not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s from the vendors' data sheets, keyed by a substring of the device name."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward; call `step_flops` with the sequence lengths of a step.

    >>> ModelFlops(per_token=10.0, per_pair=2.0, windows=(None,)).step_flops([3])
    42.0
    """

    per_token: float
    per_pair: float
    """FLOPs of one layer for one (query, key) pair."""
    windows: tuple[int | None, ...]
    """The sliding window of each attention layer; None for full attention."""

    @classmethod
    def from_model(cls, model: Any) -> ModelFlops:
        """Read the shape of a HF causal LM."""
        config: Any = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        per_token = 6.0 * _weights_per_token(model, config)
        return cls(per_token, 12.0 * heads * head_dim, _windows(config))

    def step_flops(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Return the FLOPs of a step over sequences of these lengths."""
        lengths = np.asarray(lengths, np.float64)
        pairs = sum(_pairs(lengths, window) for window in self.windows)
        return float(self.per_token * lengths.sum() + self.per_pair * pairs)


def _pairs(lengths: np.ndarray, window: int | None) -> float:
    """Count the (query, key) pairs of causal attention.

    >>> _pairs(np.array([3.0]), None), _pairs(np.array([3.0]), 2)
    (6.0, 5.0)
    """
    visible = lengths if window is None else np.minimum(lengths, window)
    return float((visible * (visible + 1) / 2 + (lengths - visible) * visible).sum())


def _windows(config: Any) -> tuple[int | None, ...]:
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        used = window if getattr(config, "use_sliding_window", True) else None
        return (used,) * layers
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def expert_fraction(config: Any) -> float:
    """Return the fraction of a layer's experts that a token is routed to; 1 without experts."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / experts if experts and active else 1.0


def _weights_per_token(model: Any, config: Any) -> float:
    """Count the matrix weights used per token; embeddings are lookups, not products."""
    active_fraction = expert_fraction(config)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in embeddings:
            is_expert = ".experts." in name
            total += parameter.numel() * (active_fraction if is_expert else 1.0)
    head = model.get_output_embeddings()
    if head is not None and id(head.weight) in embeddings:
        total += head.weight.numel()
    return total


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak bf16 FLOP/s by its data sheet; None if it is not in the table."""
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def describe_slow_bf16(model: nn.Module) -> list[str]:
    """Return a line for the banner if the model trains in bf16 on a CPU without bf16 support.

    The results are right, but bf16 is many times slower than fp32 there, and TRL's SFTConfig turns
    it on by default. Call this under the training's autocast.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or not _computes_in_bf16(parameter) or cpu_supports_bf16():
        return []
    return [
        "this CPU has no bf16 instructions, so bf16 is many times slower than fp32: pass "
        'bf16=False (HF, TRL), mixed_precision="no" (Accelerate) or precision="32-true" (Lightning)'
    ]


def _computes_in_bf16(parameter: torch.Tensor) -> bool:
    is_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_autocast else parameter.dtype
    return dtype == torch.bfloat16


def cpu_supports_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 matrices natively here, by torch's own check."""
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
