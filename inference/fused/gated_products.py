"""`gated_products`: gate and up of a gated MLP in one operator, alone or in compiled layers.

x ─▶ SiLU(x gateᵀ) * (x upᵀ) ─▶ down
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...runtime import stock_class
from ..execution.capture import run_on_streams
from ..live_model.patches import Patches, is_patch, method

_LINEARS = "gate_proj", "up_proj", "down_proj"


def gated_products(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Replace the forward of every gated MLP of plain linear layers."""
    found = [module for module in modules if _is_plain(module)]
    assert found, "no plain gated MLP"
    for module in found:
        patches.set(module, "forward", method(_gated_mlp, module))


def is_silu(activation: Any) -> bool:
    """Whether an activation of Transformers is SiLU."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _is_plain(mlp: Any) -> bool:
    """Whether a module is a gated MLP, and nobody would miss a call of its gate and up."""
    children: list[Any] = [mlp._modules.get(name) for name in (*_LINEARS, "act_fn")]
    *linears, activation = children
    if not all(type(x) is nn.Linear and x.bias is None for x in linears):
        return False
    # The logits of a short trial may hardly show a multiplier.
    code = getattr(stock_class(mlp).forward, "__code__", None)
    if code is None or {*code.co_names} != {*_LINEARS, "act_fn"} or not is_silu(activation):
        return False
    return not any(is_watched(child) for child in children)


def is_watched(module: nn.Module) -> bool:
    """Whether someone has a hook or a forward of their own on a module."""
    forward = vars(module).get("forward")
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or (forward is not None and not is_patch(forward))


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    if torch.is_autocast_enabled(x.device.type) or not x.dtype == gate.dtype == up.dtype:
        return type(mlp).forward(mlp, x)
    return mlp.down_proj(_gated_product(x, gate, up))


@torch.library.custom_op("nopad::gated_product", mutates_args=())
def _gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gated_linear(x.flatten(0, -2), gate, up).view(*x.shape[:-1], -1)


@_gated_product.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(gate))


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(x gateᵀ) * (x upᵀ) for x [M, K] and weights [N, K]."""
    from ...kernels import gated_gemm, gated_gemm_tiles, silu_mul, supports_pdl  # needs Triton

    tiles = gated_gemm_tiles(len(x), gate, up) if x.is_cuda else None
    if tiles is None:
        products = (partial(F.linear, weight=weight) for weight in (gate, up))
        return silu_mul(*run_on_streams(x, *products))
    return gated_gemm(x, gate, up, tiles, supports_pdl(x.device))
