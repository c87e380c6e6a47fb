"""`gated_products`: gate and up of a gated MLP in one operator, which torch.compile leaves whole.

x ─▶ SiLU(x gateᵀ) * (x upᵀ) ─▶ down
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..execution.capture import run_on_streams
from ..live_model.patches import Patches, method

_LINEARS = "gate_proj", "up_proj", "down_proj"


def gated_products(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Replace the forward of every gated MLP of plain linear layers; for compiled layers."""
    found = [module for module in modules if _is_plain(module)]
    assert found, "no plain gated MLP"
    for module in found:
        patches.set(module, "forward", method(_gated_mlp, module))


def is_silu(activation: Any) -> bool:
    """Whether an activation of Transformers is SiLU."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _is_plain(mlp: Any) -> bool:
    linears = [mlp._modules.get(name) for name in _LINEARS]
    if not all(type(x) is nn.Linear and x.bias is None for x in linears):
        return False
    hooked = any(x._forward_hooks or x._forward_pre_hooks for x in linears)
    return not hooked and is_silu(mlp._modules.get("act_fn"))


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(_gated_product(x, mlp.gate_proj.weight, mlp.up_proj.weight))


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
