"""Large matrix products of decoder layers in fp8, by torchao; weights and optimizer stay as is.

    x [T, K]       e4m3, a scale per token                 ┐
    weight [N, K]  e4m3, a scale per output channel        ├─ cast anew in each product: "rowwise"
    gradients      e4m3, a scale per token or channel      ┘

No scale of a forward, and none of the gradient of its input, spans two tokens: documents of a pack
stay as isolated as in bf16. Evaluations and generation run the stock products of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.hf import decoder_layers
from ...runtime import stock_class
from .class_swap import SwappedLayers, added_forwards
from .compile_layers import function_mode_active
from .experts import is_quantized

MIN_WEIGHTS = 2**23
"""Elements of the smallest weight whose products gain more than the casts cost: 4096 x 2048."""
_ALIGNMENT = 16
"""The sizes of an fp8 product are multiples of it."""

_BATCH_INVARIANT = "batch_invariant computes every product in one shape, in the weights' precision"


def use_fp8(model: nn.Module, swapped: SwappedLayers) -> None:
    """Run the large products of a model's decoder layers in fp8 while they train."""
    forward = Fp8Forward()
    for linear in _large_linears(model).values():
        swapped.swap(linear, forward)


def uses_fp8(model: nn.Module) -> bool:
    """Whether `use_fp8` was called on a model, and not undone."""
    forwards = (forward for module in model.modules() for forward in added_forwards(type(module)))
    return any(isinstance(forward, Fp8Forward) for forward in forwards)


def why_not_fp8(model: nn.Module, device: torch.device) -> str:
    """Return why the products of a model cannot run in fp8 on a device; "" if they can."""
    if function_mode_active():
        return _BATCH_INVARIANT
    return why_not_device(device) or _why_not_model(model)


def why_not_device(device: torch.device) -> str:
    """Return why a device of this machine has no fp8 products; "" if it has."""
    if device.type != "cuda":
        return f"fp8 products need a GPU, and the model trains on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        return f"fp8 products need a GPU of compute capability 8.9 or newer, and {name}"
    return "" if find_spec("torchao") else "torchao is not installed (pip install 'nopad[fp8]')"


def _why_not_model(model: nn.Module) -> str:
    for layer in decoder_layers(model):
        for name, weight in layer.named_parameters():
            if is_quantized(weight):
                return f"the weights are quantized ({name} of a layer is {weight.dtype})"
    linears = _large_linears(model)
    if not linears:
        return f"no linear layer has the {MIN_WEIGHTS:,} weights from which on fp8 is faster"
    for name, linear in linears.items():
        if any(size % _ALIGNMENT for size in linear.weight.shape):
            shape = " x ".join(map(str, linear.weight.shape))
            return f"{name} is {shape}, and fp8 products need multiples of {_ALIGNMENT}"
    return ""


def _large_linears(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers that gain; adapters and the projections of a few heads do not."""
    return {
        f"layers.{number}.{name}": module
        for number, layer in enumerate(decoder_layers(model))
        for name, module in layer.named_modules()
        if stock_class(module) is nn.Linear and _size(module) >= MIN_WEIGHTS
    }


def _size(linear: Any) -> int:
    return linear.weight.numel()


class Fp8Forward:
    """A linear layer's forward in fp8, while it trains: see `class_swap.Forward`."""

    def __init__(self) -> None:
        """Take torchao's recipe of rowwise scales."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        self._product: Any = matmul_with_hp_or_float8_args
        template = rowwise_linear()
        self._settings = template.linear_mm_config, template.config

    def __reduce__(self) -> tuple:
        return Fp8Forward, ()

    def __call__(self, linear: Any, stock: Callable, x: Tensor) -> Tensor | None:
        if not linear.training:
            return None
        if not torch.compiler.is_compiling() and function_mode_active():
            raise ValueError(f"fp8=True: {_BATCH_INVARIANT}; omit fp8")
        device, features = x.device.type, x.shape[-1]
        is_autocast = torch.is_autocast_enabled(device)
        rows = x.to(torch.get_autocast_dtype(device) if is_autocast else x.dtype).view(-1, features)
        # The gradient of the weight sums over tokens, so that their number is a size of a product.
        # In this form torch.compile sees a multiple for any number, and no row is compiled again.
        aligned = (rows.shape[0] + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        padded = F.pad(rows, (0, 0, 0, aligned - rows.shape[0]))
        out = self._product.apply(padded, linear.weight.t(), *self._settings)[: rows.shape[0]]
        if linear.bias is not None:
            out = out + linear.bias.to(out.dtype)
        return out.view(*x.shape[:-1], -1)


def rowwise_linear() -> Any:
    """Return torchao's linear layer with rowwise scales, without weights."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    linear = nn.Linear(_ALIGNMENT, _ALIGNMENT, device="meta")
    return convert_to_float8_training(linear, config=config)
