"""Fused forwards for RMSNorm, gated MLP, rotary and residual add, installed as patches.

Each function puts its replacement on a model's modules through `patches`; see `fused_ops.FusedOp`.
It raises AssertionError for a model that is built otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import global_of, rebind_global, rms_norm_eps, stock_class
from ..execution.capture import run_on_streams
from ..live_model.patches import Patches

ROTARY_FUNCTION = "apply_rotary_pos_emb"


def norms(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Replace the forward of every RMSNorm."""
    from ...kernels import rms_norm

    for module in modules:
        eps = rms_norm_eps(module)
        if eps is not None:

            def forward(x: Tensor, m: Any = module, eps: float = eps) -> Tensor:
                return rms_norm(x, m.weight, eps)

            patches.set(module, "forward", forward)


def gated_mlps(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Replace the activation and product of every gated MLP."""
    from ...kernels import silu_mul

    for module in modules:
        if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
            continue

        def forward(x: Tensor, m: Any = module) -> Tensor:
            gate, up = run_on_streams(x, m.gate_proj, m.up_proj)
            return m.down_proj(silu_mul(gate, up))

        patches.set(module, "forward", forward)


def rotary(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Replace the rotary embedding in the forward of every attention that calls one.

    The modules get a copy of their forward with the fused function among its globals. Other models
    of the same file are not affected.
    """
    for module in modules:
        forward = getattr(stock_class(module), "forward", None)
        stock = global_of(forward, ROTARY_FUNCTION)
        if stock is not None:
            assert is_neox_rotary(stock), "another rotary formula"
            patches.set(module, "forward", partial(_with_fused_rotary(forward), module))


@cache
def _with_fused_rotary(forward: Any) -> Callable[..., Any]:
    """Return a copy of a forward that calls our rotary kernel."""
    from ...kernels import apply_rotary

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
        assert unsqueeze_dim == 1 and q.shape[0] == 1 and cos.shape[-1] == q.shape[-1]
        return apply_rotary(q, k, cos, sin)

    return rebind_global(forward, ROTARY_FUNCTION, apply)


@lru_cache(maxsize=64)
def is_neox_rotary(function: Any) -> bool:
    """Whether a function rotates halves, as our kernel does (GPT-NeoX style).

    The logits of a short trial may hardly show the difference to rotating pairs.
    """
    values = torch.arange(1, 145, dtype=torch.float32).sin()
    q, k = values[:96].view(1, 4, 3, 8), values[48:].view(1, 4, 3, 8)
    cos, sin = values[7:31].view(1, 3, 8), values[60:84].view(1, 3, 8)
    for x, rotated in zip((q, k), function(q, k, cos, sin), strict=True):
        x1, x2 = x.chunk(2, dim=-1)
        if not torch.allclose(rotated, x * cos + torch.cat([-x2, x1], dim=-1) * sin, atol=1e-5):
            return False
    return True


def residual_adds(modules: Sequence[nn.Module], patches: Patches) -> None:
    """Defer each residual add to the next RMSNorm, whose kernel does it in the same pass.

    A layer returns the residual before its last add and keeps the pending delta; the norm that is
    next called with that tensor adds it. The layers must be norm, attention, norm, MLP.
    """
    from ...kernels import add_rms_norm, rms_norm

    body: Any = getattr(modules[0], "model", None)
    layers = getattr(body, "layers", None)
    assert layers is not None and rms_norm_eps(body.norm) is not None, "no plain stack of layers"
    pending = _PendingResidual(rms_norm, add_rms_norm)
    for layer in layers:
        names = {name for name, _ in layer.named_children()}
        assert names == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
        norm_modules = (layer.input_layernorm, layer.post_attention_layernorm)
        assert all(rms_norm_eps(norm) is not None for norm in norm_modules)
        patches.set(layer, "forward", partial(_layer_forward, pending, layer))
    patches.on_restore(pending.clear)
    patches.set(body.norm, "forward", lambda x: pending.add_and_norm(body.norm, x)[1])


class _PendingResidual:
    """The residual add that the next norm has to do: a residual and the delta to add to it."""

    def __init__(self, rms_norm: Callable[..., Any], add_rms_norm: Callable[..., Any]) -> None:
        self._rms_norm, self._add_rms_norm = rms_norm, add_rms_norm
        self._residual: Tensor | None = None
        self._delta: Tensor | None = None

    def defer(self, residual: Tensor, delta: Tensor) -> None:
        self._residual, self._delta = residual, delta

    def clear(self) -> None:
        self._residual = self._delta = None

    def add_and_norm(self, norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, with the pending delta if it is pending for x, and its norm."""
        eps = rms_norm_eps(norm)
        assert eps is not None
        residual, delta = self._residual, self._delta
        self.clear()
        if delta is None or residual is not x:
            return x, self._rms_norm(x, norm.weight, eps)
        return self._add_rms_norm(x, delta, norm.weight, eps)


def _layer_forward(
    pending: _PendingResidual, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    residual, x = pending.add_and_norm(layer.input_layernorm, hidden_states)
    attn_out = layer.self_attn(x, *args, **kwargs)[0]
    pending.defer(residual, attn_out)
    residual, x = pending.add_and_norm(layer.post_attention_layernorm, residual)
    pending.defer(residual, layer.mlp(x))
    return residual
