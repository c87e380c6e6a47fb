"""bf16 on a CPU that has no instructions for it: right, but many times slower than fp32.

TRL's SFTConfig turns bf16 on by default, also where it trains on a CPU.
"""

from __future__ import annotations

import torch
from torch import nn


def describe_slow_bf16(model: nn.Module) -> list[str]:
    """Return a line for the banner if the model trains in bf16 on a CPU without bf16 support.

    Call it under the training's autocast.
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
