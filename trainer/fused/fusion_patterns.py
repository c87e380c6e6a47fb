"""The kinds of modules that `fuse_layers` fuses, each with its check.

    RMSNormPart         one kernel forward, two backward
    GatedMLPPart        one kernel between the products; hidden states are not kept
    DecoderLayerPart    residual adds inside the norms' kernels
    RotaryPart          queries and keys rotated by one kernel
    AttentionPart       q, k and v as one operation; see linear_group.py

A part is a class of three static functions, so that pickle finds the forwards by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...runtime import STOCK_CLASS, rms_norm_eps, stock_class
from .class_swap import can_run, fused_forwards, has_no_hooks, is_as_verified
from .equivalence import (
    module_matches,
    outputs_match,
    trial_copies,
    trial_input,
    trial_precisions,
    under_autocast,
)
from .linear_group import linear_group
from .projection import Projection, product_dtype, read_projection
from .projection_view import calls_projections_on_input, run_with_projections
from .rotary_patch import has_globals_of, rotary_function, rotary_matches, with_fused_rotary
from .saved_rows import NormedRows, note_source


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
        if eps is None or not (_fits(args[0], module) and is_as_verified(module)):
            return None
        from .rms_norm import rms_norm

        return rms_norm(args[0], module.weight, eps)

    verify = staticmethod(module_matches)


def _fits(x: Tensor, norm: Any) -> bool:
    """Whether a norm has a gain for every column: the kernels read as many as x has."""
    return norm.weight.shape == x.shape[-1:]


class GatedMLPPart:
    @staticmethod
    def matches(module: Any) -> bool:
        names = {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return names <= module._modules.keys() and _mlp_projections(module) is not None

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        projections = None
        if len(args) == 1 and not kwargs and can_run(args[0]) and is_as_verified(module):
            projections = _mlp_projections(module)
        dtype = None if projections is None else product_dtype(args[0], projections)
        if projections is None or dtype is None:
            return None
        from .gated_mlp import gated_mlp

        return gated_mlp(args[0], projections, dtype)

    verify = staticmethod(module_matches)


def _mlp_projections(mlp: Any) -> list[Projection] | None:
    """Return gate, up and down of an MLP that is plain at the moment; None for others."""
    if not _is_plain_silu(mlp.act_fn):
        return None
    projections = _read_all((mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    has_bias = projections and any(p.bias is not None for p in projections)
    return None if has_bias else projections


def _is_plain_silu(act: Any) -> bool:
    """Whether an activation is PyTorch's SiLU or that of Transformers, without hooks."""
    name = f"{type(act).__module__}.{type(act).__qualname__}"
    return name in _SILU and has_no_hooks(act)


_SILU = "torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"


def _read_all(layers: Iterable[Any]) -> list[Projection] | None:
    """Return the projections of linear layers; None if one of them is something else."""
    projections = [read_projection(layer) for layer in layers]
    return None if None in projections else projections  # pyright: ignore[reportReturnType]


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
        if len(args) != 1 or not can_run(args[0]) or not is_as_verified(module):
            return None
        x, norms = args[0], _norms(module)
        if not all(_is_fused_norm(norm) and _fits(x, norm) for norm in norms):
            return None
        from .rms_norm import add_rms_norm

        first, second = norms
        dtype = _read_dtype(x, module.self_attn, AttentionPart)
        x, normed = add_rms_norm(x, None, first.weight, rms_norm_eps(first) or 0.0, dtype)
        _note_source(normed, x, first)
        attn_out = module.self_attn(hidden_states=normed, **kwargs)[0]
        dtype = _read_dtype(x, module.mlp, GatedMLPPart)
        x, normed = add_rms_norm(x, attn_out, second.weight, rms_norm_eps(second) or 0.0, dtype)
        _note_source(normed, x, second, _is_recomputed(module))
        return x + module.mlp(normed)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        trial: Any = object.__new__(type(module))
        vars(trial).update(
            vars(module), _modules={**module._modules, "self_attn": _AttentionStub()}
        )
        return all(
            under_autocast(device, dtype, partial(_layer_matches, layer, fused_class))
            for layer in trial_copies(trial, device)
            for dtype in trial_precisions(_norms(layer)[0].weight.dtype)
        )


def _layer_matches(layer: Any, fused_class: Any) -> bool:
    weights = list(layer.parameters())
    x = trial_input(weights[0], 1, 5, _norms(layer)[0].weight.shape[-1])
    names = "attention_mask", "position_ids", "position_embeddings", "cu_seq_lens_q"
    kwargs = {name: object() for name in names}
    stock, fused = (partial(cls.forward, layer, **kwargs) for cls in (type(layer), fused_class))
    if not outputs_match(stock, fused, [x], weights):
        return False
    calls = layer.self_attn.calls[-2:]
    return len(calls) == 2 and calls[0] == calls[1]


class _AttentionStub(nn.Module):
    """Records its keyword arguments and returns a function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.calls.append({k: v for k, v in kwargs.items() if v is not None and v is not False})
        return hidden_states.cos(), None


def _note_source(normed: Tensor, x: Tensor, norm: Any, is_recomputed: bool = False) -> None:
    """Let the products that read a norm normalize again instead of keeping it."""
    eps = rms_norm_eps(norm) or 0.0
    source = NormedRows(x.detach(), norm.weight.detach(), eps, normed.dtype, is_recomputed)
    note_source(normed, source)


def _is_recomputed(layer: Any) -> bool:
    """Whether Transformers checkpoints a layer, by the kind that can stop early."""
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return False
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return getattr(function, "keywords", {}).get("use_reentrant") is False


def _read_dtype(x: Tensor, reader: Any, part: Any) -> torch.dtype | None:
    """Return the dtype in which a fused module reads its input; None if it may read any."""
    if not torch.is_autocast_enabled(x.device.type) or part.forward not in fused_forwards(
        type(reader)
    ):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


def _is_fused_norm(norm: Any) -> bool:
    if not hasattr(type(norm), STOCK_CLASS) or rms_norm_eps(norm) is None:
        return False
    return has_no_hooks(norm) and is_as_verified(norm)


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
        fused = with_fused_rotary(fallback)
        if not (can_run(_hidden_states(args, kwargs)) and has_globals_of(fused, fallback)):
            return None
        return fused(module, *args, **kwargs)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        own, function = next(module.parameters()).dtype, rotary_function(type(module).forward)
        return all(
            under_autocast(device, autocast, partial(rotary_matches, function, dtype, device))
            for autocast in trial_precisions(own)
            for dtype in {autocast or own, torch.float32}
        )


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


class AttentionPart:
    """Attention modules whose q, k and v projections become one operation.

    The stock forward runs on a view of the module whose projections return the outputs that were
    computed together; under autocast the output projection's weight is cast like theirs. The trial
    checks that they are called with the module's own input.
    """

    @staticmethod
    def matches(module: Any) -> bool:
        return set(_QKV) <= module._modules.keys() and _read_all(_qkv(module)) is not None

    @staticmethod
    def forward(module: Any, fallback: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = _hidden_states(args, kwargs)
        projections = None
        if can_run(x) and torch.is_grad_enabled():
            projections = _read_all(_qkv(module))
        dtype = None if projections is None else product_dtype(x, projections)
        if projections is None or dtype is None:
            return None
        outs = zip(_QKV, linear_group(x, projections, dtype), strict=True)
        forwards = {name: _answer(x, out, module._modules[name]) for name, out in outs}
        output = module._modules.get("o_proj")
        if output is not None and read_projection(output) is not None:
            forwards["o_proj"] = partial(_linear, output)
        return run_with_projections(fallback, module, forwards, args, kwargs)

    @staticmethod
    def verify(module: Any, fused_class: Any, device: torch.device) -> bool:
        if not calls_projections_on_input(module, stock_class(module).forward):
            return False
        layers = nn.ModuleList(_qkv(module))
        return all(
            under_autocast(device, dtype, partial(_qkv_matches, list(copy)))
            for copy in trial_copies(layers, device)
            for dtype in trial_precisions(next(copy.parameters()).dtype)
        )


def _qkv_matches(layers: list[Any]) -> bool:
    projections = _read_all(layers) or []
    x = trial_input(layers[0].weight, 1, 5, layers[0].weight.shape[-1])

    def fused(x: Tensor) -> tuple[Tensor, ...]:
        dtype = product_dtype(x, projections)
        return stock(x) if dtype is None else linear_group(x, projections, dtype)

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in layers)

    weights = [p for layer in layers for p in layer.parameters()]
    return outputs_match(stock, fused, [x], weights)


def _answer(x: Tensor, out: Tensor, layer: Any) -> Callable[[Tensor], Tensor]:
    """Return a forward that has the output for x already, and computes that for any other input."""
    return lambda given: out if given is x else type(layer).forward(layer, given)


def _linear(layer: Any, x: Tensor) -> Tensor:
    """Run one linear layer, without a cast of its weight for every call."""
    projection = read_projection(layer)
    dtype = projection and product_dtype(x, [projection])
    if projection is None or dtype is None:
        return type(layer).forward(layer, x)
    return linear_group(x, [projection], dtype)[0]


def _qkv(attention: Any) -> list[Any]:
    return [attention._modules[name] for name in _QKV]


_QKV = "q_proj", "k_proj", "v_proj"


PARTS: tuple[type[Part], ...] = (
    RMSNormPart,
    GatedMLPPart,
    DecoderLayerPart,
    RotaryPart,
    AttentionPart,
)
"""In the order they are fused: a layer needs fused norms, and rotary rewrites the stock forward."""
