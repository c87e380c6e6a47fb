"""torch.compile for packed training: one graph, shared by all decoder layers of a kind.

    layer.forward     compiled, fullgraph=True     attention is one operator inside
    layer's hooks     outside: FSDP2 gathers weights, a checkpoint recomputes the whole layer

Compiling the layer instead of the model takes a sixteenth of the time and loses nothing that
matters: between two layers there is only the residual. Row length, number of sequences and longest
sequence are dynamic, so that no pack is compiled again.

Tensors that are cheap to recompute are not kept for the backward: the inputs of products (normed
hidden states, gated MLP states) are a third of a layer's activations, and are recomputed by the
kernels that read their sources anyway: a fifth less memory for half a percent of time, on an H200.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Varlen
from ...attention.hf import (
    check_lengths,
    collect_router_logits,
    current_varlen,
    forward_context,
    install_router_hooks,
    refuse_other_outputs,
    returning_router_logits,
    run_by_document,
)
from .class_swap import FusedLayers, add_forward, fused_forwards
from .experts import ExpertsPart

log = logging.getLogger("nopad.trainer")

DYNAMO = {"skip_nnmodule_hook_guards": False}
"""Settings of torch.compile: by default, a graph ignores hooks that come after its first call."""


def compile_layers(model: nn.Module, **options: Any) -> FusedLayers:
    """Compile every decoder layer of a causal LM in place; return what was compiled.

    Forwards of packs in training mode are compiled. Others, such as those of `generate`, run as
    before.

    Args:
        model: a causal LM of Transformers.
        options: those of torch.compile; `fullgraph=True` by default.
    """
    layers = max(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)),
        key=lambda module: sum(p.numel() for p in module.parameters()),
        default=None,
    )
    if layers is None or not len(layers):
        raise ValueError(f"{type(model).__name__} has no list of decoder layers to compile")
    if any(run_by_document in fused_forwards(type(module)) for module in layers.modules()):
        raise ValueError(
            f"{type(model).__name__} has layers with a state that run document by document, which "
            "cannot be compiled: train it without compile_layers"
        )
    install_router_hooks(model)
    forward = CompiledForward({"fullgraph": True, "backend": recompute_backend, **options})
    compiled = FusedLayers()
    for experts in filter(ExpertsPart.matches, model.modules()):
        grouped = add_forward(type(experts), ExpertsPart.forward)
        if ExpertsPart.verify(experts, grouped, next(experts.parameters()).device):
            compiled.swap(experts, grouped)
    for layer in layers:
        compiled.swap(layer, add_forward(type(layer), forward))
        compiled.add_name(type(layer).__name__)
    return compiled


class CompiledForward:
    """A layer's forward, compiled: see `class_swap.Forward`."""

    def __init__(self, options: dict[str, Any]):
        self._options, self._logged_group = options, False
        self._compiled = cache(lambda stock: torch.compile(_bind(stock), **options))

    def __reduce__(self) -> tuple:
        return CompiledForward, (self._options,)

    def __call__(self, layer: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        if not layer.training or torch.compiler.is_compiling():
            return None
        x = args[0] if args else kwargs["hidden_states"]
        boundaries = _boundaries(layer, x, kwargs)
        if boundaries is None or boundaries.pages is not None:
            return None  # a graph cannot read boundaries from positions
        if boundaries.group is not None:
            if not self._logged_group:
                log.warning("sequence-parallel rows run uncompiled")
            self._logged_group = True
            return None
        refuse_other_outputs()
        check_lengths(_configured(layer), boundaries)
        _mark_dynamic((args, kwargs), x.shape[1], boundaries.cu_seqlens)
        max_length: Any = torch.tensor(boundaries.max_length)
        packed = {"cu_seq_lens_q": boundaries.cu_seqlens, "max_length_q": max_length}
        context = nullcontext()
        if current_varlen(layer) is not None:
            context = forward_context(Varlen(boundaries.cu_seqlens, max_length))
        with context, torch._dynamo.config.patch(DYNAMO):
            out, router_logits = self._compiled(stock)(layer, *args, **{**kwargs, **packed})
        collect_router_logits(router_logits)
        return out


def _bind(stock: Callable) -> Callable:
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, list]:
        return returning_router_logits(stock, *args, **kwargs)

    return forward


def _boundaries(layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Varlen | None:
    """Take the boundaries of a row out of a layer's arguments; None where there are none."""
    varlen = kwargs.pop("varlen", None) or current_varlen(layer)
    if varlen is not None:
        return varlen
    names = "cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"
    cu_seqlens, max_length, *_ = (kwargs.pop(name, None) for name in names)
    if cu_seqlens is None:
        return None
    return Varlen(cu_seqlens, x.shape[0] * x.shape[1] if max_length is None else int(max_length))


def _configured(layer: nn.Module) -> nn.Module:
    """Return the module inside a layer that knows the model's config: its attention."""
    return next((module for module in layer.modules() if "config" in vars(module)), layer)


def _mark_dynamic(inputs: Any, tokens: int, cu_seqlens: Tensor) -> None:
    """Tell torch.compile that the length of rows and the number of sequences change."""
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    for x in torch.utils._pytree.tree_leaves(inputs):
        if isinstance(x, Tensor):
            for dim in range(x.ndim):
                if x.shape[dim] == tokens:
                    torch._dynamo.maybe_mark_dynamic(x, dim)


def recompute_backend(
    graph: Any, inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compile by torch.compile's own backend, set to keep little for the backward."""
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx

    settings = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    # With adapters, the input of a product feeds a second one: "used far apart", hence kept.
    keep_little = {
        "ban_recompute_materialized_backward": False,
        "ban_recompute_used_far_apart": False,
    }
    with functorch.patch(keep_little):
        return compile_fx(graph, inputs, config_patches=settings)
