"""Large products of compiled layers in fp8; weights, gradients and optimizer stay as they are.

A product is taken while its layer is traced, so that evaluations, generation and checkpoints know
nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...attention.hf import decoder_layers
from .experts import is_quantized

MIN_WEIGHTS = 2**22
"""Elements of the smallest weight whose products gain more than the casts cost: 4096 x 1024."""
_ALIGNMENT = 16
"""The sizes of a weight are multiples of it."""


class Fp8Linears(TorchFunctionMode):
    """While a layer is traced, its products with large weights are traced in fp8."""

    def __init__(self) -> None:
        super().__init__()
        from .fp8_product import Fp8Product  # needs Triton, which compiled layers have on a GPU

        self._product: Any = Fp8Product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.compiler.is_compiling() and _gains(*args, **kwargs):
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        out = self._product.apply(x.reshape(-1, x.shape[-1]), weight)
        out = out if bias is None else out + bias.to(out.dtype)
        return out.view(*x.shape[:-1], -1)


def _gains(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return weight.ndim == 2 and weight.numel() >= MIN_WEIGHTS and _is_aligned(weight)


def _is_aligned(weight: Tensor) -> bool:
    return not any(size % _ALIGNMENT for size in weight.shape)


def why_not_fp8(model: nn.Module, device: torch.device) -> str:
    """Return why the products of a model's layers cannot run in fp8 on a device; "" if they can."""
    return why_not_device(device) or _why_not_layers(nn.ModuleList(decoder_layers(model)))


def why_not_device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"fp8 products need a GPU, and the model trains on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        return f"fp8 products need a GPU of compute capability 8.9 or newer, and {name}"
    return ""


def _why_not_layers(layers: nn.ModuleList) -> str:
    for name, weight in layers.named_parameters():
        if is_quantized(weight):
            return f"the weights are quantized (layers.{name} is {weight.dtype})"
    large = {
        name: module.weight
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear) and module.weight.numel() >= MIN_WEIGHTS
    }
    if not large:
        return f"no linear layer has the {MIN_WEIGHTS:,} weights from which on fp8 is faster"
    for name, weight in large.items():
        if not _is_aligned(weight):
            shape = " x ".join(map(str, weight.shape))
            return f"layers.{name} is {shape}, and fp8 products need multiples of {_ALIGNMENT}"
    return ""
