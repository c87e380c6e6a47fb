"""The kinds of modules that `fuse_layers` fuses, each with its check.

    RMSNormPart         one kernel forward, two backward
    GatedMLPPart        one kernel between the products; hidden states are not kept
    DecoderLayerPart    residual adds inside the norms' kernels
    RotaryPart          queries and keys rotated by one kernel
    AttentionPart       q, k and v as one operation; see qkv_linear.py

A part is a class of three static functions, so that pickle finds the forwards by name.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...runtime import STOCK_CLASS, rms_norm_eps, stock_class
from .class_swap import can_run, has_no_hooks, is_plain_linear
from .equivalence import module_matches, outputs_match, trial_copies, trial_input
from .projection_view import calls_projections_on_input, run_with_projections
from .qkv_linear import qkv_linear
from .rotary_patch import rotary_function, rotary_matches, with_fused_rotary


class Part(Protocol):
    """A kind of module with a fused forward."""

    @staticmethod
    def matches(module: Any) -> bool:
        """Whether a module looks like one of this kind."""
        ...

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output, or None where the kernels cannot run: see `class_swap.Forward`."""

    @staticmethod
    def verify(module: Any, fused_class: type, device: torch.device) -> bool:
        """Whether the fused forward computes the same, tried on `device`."""
        ...


class RMSNormPart:
    @staticmethod
    def matches(module: Any) -> bool:
        return rms_norm_eps(module) is not None

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(args) != 1 or kwargs or not can_run(args[0]):
            return None
        eps = rms_norm_eps(module)
        if eps is None or args[0].dtype != module.weight.dtype:
            return None
        from .rms_norm import rms_norm

        return rms_norm(args[0], module.weight, eps)

    verify = staticmethod(module_matches)


class GatedMLPPart:
    @staticmethod
    def matches(module: Any) -> bool:
        names = {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return names <= module._modules.keys() and _has_plain_projections(module)

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(args) != 1 or kwargs or not can_run(args[0]) or not _has_plain_projections(module):
            return None
        from .gated_mlp import gated_mlp

        x = args[0]
        inputs = (x, *(linear.weight for linear in _projections(module)))
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            inputs = tuple(tensor.to(dtype) for tensor in inputs)
        return gated_mlp(*inputs)

    verify = staticmethod(module_matches)


def _projections(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _has_plain_projections(mlp: Any) -> bool:
    return all(is_plain_linear(linear) and linear.bias is None for linear in _projections(mlp))


class DecoderLayerPart:
    """Decoder layers whose residual adds move into the norms' kernels.

    x ─┬─ norm ─ attention ─┬─ norm ─ MLP ─┐      forward: add and norm in one pass
       └────────────────────+──────────────+─▶    backward: the residual's gradient is added there

    The attention is not tried, since its arguments are unknown: a stub takes its place, and both
    forwards must call it with the same arguments. A layer that scales, drops out or caps anything
    does not match.
    """

    @staticmethod
    def matches(module: Any) -> bool:
        names = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
        return names == module._modules.keys() and all(map(_is_fused_norm, _norms(module)))

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(args) != 1 or not can_run(args[0]):
            return None
        x, norms = args[0], _norms(module)
        if not all(_is_fused_norm(norm) and norm.weight.dtype == x.dtype for norm in norms):
            return None
        from .rms_norm import add_rms_norm

        first, second = norms
        x, normed = add_rms_norm(x, None, first.weight, rms_norm_eps(first) or 0.0)
        attn_out = module.self_attn(hidden_states=normed, **kwargs)[0]
        x, normed = add_rms_norm(x, attn_out, second.weight, rms_norm_eps(second) or 0.0)
        return x + module.mlp(normed)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        trial = copy(module)
        trial._modules = {**module._modules, "self_attn": _AttentionStub()}
        return all(_layer_matches(layer, fused_class) for layer in trial_copies(trial, device))


def _layer_matches(layer: Any, fused_class: Any) -> bool:
    weights = list(layer.parameters())
    x = trial_input(weights[0], 1, 5, _norms(layer)[0].weight.shape[-1])
    names = "attention_mask", "position_ids", "position_embeddings", "cu_seq_lens_q"
    kwargs = {name: object() for name in names}
    stock, fused = (partial(cls.forward, layer, **kwargs) for cls in (type(layer), fused_class))
    if not outputs_match(stock, fused, [x], weights):
        return False
    calls = layer.self_attn.calls
    return len(calls) == 2 and calls[0] == calls[1]


class _AttentionStub(nn.Module):
    """Records its keyword arguments and returns a function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.calls.append({k: v for k, v in kwargs.items() if v is not None and v is not False})
        return hidden_states.cos(), None


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


def _is_fused_norm(norm: Any) -> bool:
    fused = hasattr(type(norm), STOCK_CLASS)
    return fused and has_no_hooks(norm) and rms_norm_eps(norm) is not None


class RotaryPart:
    """Attention modules whose forward calls `apply_rotary_pos_emb` of their file.

    The stock forward runs, with the fused function in place of that global; the file itself, and
    every other model of it in the process, are unchanged.
    """

    @staticmethod
    def matches(module: Any) -> bool:
        return rotary_function(type(module).forward) is not None

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Any:
        if not can_run(_hidden_states(args, kwargs)):
            return None
        return with_fused_rotary(fallback)(module, *args, **kwargs)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        dtypes = {next(module.parameters()).dtype, torch.float32}
        function = rotary_function(type(module).forward)
        return all(rotary_matches(function, dtype, device) for dtype in dtypes)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


class AttentionPart:
    """Attention modules whose q, k and v projections become one operation.

    The stock forward runs on a view of the module whose projections return the outputs that were
    computed together. The trial checks that they are called with the module's own input.
    """

    @staticmethod
    def matches(module: Any) -> bool:
        names = {"q_proj", "k_proj", "v_proj"}
        return names <= module._modules.keys() and all(map(is_plain_linear, _qkv(module)))

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = _hidden_states(args, kwargs)
        linears = _qkv(module)
        runs = can_run(x) and torch.is_grad_enabled() and all(map(is_plain_linear, linears))
        if not runs:
            return None
        q, k, v = qkv_linear(x, linears)
        outputs: dict[str, Tensor] = {"q_proj": q, "k_proj": k, "v_proj": v}
        return run_with_projections(fallback, module, x, outputs, args, kwargs)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        linears = _qkv(module)
        if not calls_projections_on_input(module, stock_class(module).forward):
            return False
        return all(_qkv_matches(list(c)) for c in trial_copies(nn.ModuleList(linears), device))


def _qkv_matches(linears: list[nn.Linear]) -> bool:
    weights = [p for linear in linears for p in linear.parameters()]
    x = trial_input(weights[0], 1, 5, linears[0].in_features)
    return outputs_match(
        lambda x: tuple(linear(x) for linear in linears),
        lambda x: qkv_linear(x, linears),
        [x],
        weights,
    )


def _qkv(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


PARTS: tuple[type[Part], ...] = (
    RMSNormPart,
    GatedMLPPart,
    DecoderLayerPart,
    RotaryPart,
    AttentionPart,
)
"""In the order they are fused: a layer needs fused norms, and rotary rewrites the stock forward."""
