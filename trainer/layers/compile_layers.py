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
from torch._dynamo.exc import TorchDynamoException
from torch.utils._device import DeviceContext

from ...attention import Varlen
from ...attention.hf import (
    check_lengths,
    collect_router_logits,
    convolve_by_document,
    current_varlen,
    forward_context,
    install_router_hooks,
    pass_boundaries,
    returning_router_logits,
    run_by_document,
    wants_other_outputs,
)
from .class_swap import SwappedLayers, added_forwards
from .delta_rule import trace_as_operator
from .experts import group_experts, quantized_experts
from .fp8 import Fp8Linears
from .inductor_startup import start_inductor, wait_for_inductor

log = logging.getLogger("nopad.trainer")

DYNAMO = {"skip_nnmodule_hook_guards": False, "optimize_ddp": False, "recompile_limit": 256}
"""Settings of torch.compile: by default, a graph ignores hooks that come after its first call, DDP
cuts the graph of a layer at its buckets, and the ninth graph in a process raises. All kinds of
layers of all models count: their forwards share the code of `_bind`."""


def compile_layers(model: nn.Module, **options: Any) -> SwappedLayers:
    """Compile every decoder layer of a causal LM in place; return what was compiled.

    Forwards of packs in training mode are compiled. Others, such as those of `generate`, run as
    before.

    Args:
        model: a causal LM of Transformers.
        options: those of torch.compile; `fullgraph=True` by default, without states.
    """
    reason = why_not_compiled(model)
    if reason:
        raise ValueError(f"the layers of {type(model).__name__} cannot be compiled: {reason}")
    forward = CompiledForward({**graph_options(model), **options})
    return compile_with(forward, model, next(model.parameters()).device)


def graph_options(model: nn.Module) -> dict[str, Any]:
    """Return the options of torch.compile for a model: modules outside cut the graph."""
    is_cut = any(
        run_by_document in added_forwards(type(module)) or _calls_library(module)
        for module in _layers(model).modules()
    )
    return {"fullgraph": False, "dynamic": True} if is_cut else {"fullgraph": True}


def compile_with(forward: CompiledForward, model: nn.Module, device: torch.device) -> SwappedLayers:
    """Give every decoder layer of a causal LM a compiled forward, and group its experts."""
    if device.type == "cuda":
        start_inductor(device.index or 0)
    install_router_hooks(model)
    compiled = SwappedLayers()
    group_experts(model, compiled, device)
    for module in _layers(model).modules():
        if _calls_library(module):
            compiled.swap(module, run_uncompiled)
        elif convolve_by_document in added_forwards(type(module)):
            trace_as_operator(module)
    for layer in _layers(model):
        compiled.swap(layer, forward)
        compiled.add_name(type(layer).__name__)
    return compiled


def why_not_compiled(model: nn.Module) -> str:
    """Return why the layers of a model cannot be compiled; "" if they can."""
    layers = _layers(model)
    if not len(layers):
        return "it has no list of decoder layers"
    if weight := quantized_experts(layers):
        return f"their experts are quantized ({weight})"
    return ""


def _calls_library(module: nn.Module) -> bool:
    """Whether the states of a module are reset by kernels of a library, which are not traced."""
    resets = {run_by_document, convolve_by_document}
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and resets.isdisjoint(added_forwards(type(module)))


@torch.compiler.disable
def run_uncompiled(module: nn.Module, fallback: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a module outside of the graphs of its layer: see `class_swap.Forward`."""
    return fallback(module, *args, **kwargs)


def compiled_forward(model: nn.Module) -> CompiledForward | None:
    """Return the compiled forward that the layers of a model have already, if any."""
    forwards = (forward for layer in _layers(model) for forward in added_forwards(type(layer)))
    return next((forward for forward in forwards if isinstance(forward, CompiledForward)), None)


def _layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers: the one with most weights."""
    return max(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)),
        key=lambda module: sum(p.numel() for p in module.parameters()),
        default=nn.ModuleList(),
    )


class CompiledForward:
    """A layer's forward, compiled: see `class_swap.Forward`."""

    def __init__(self, options: dict[str, Any], falls_back: bool = False, fp8: bool = False):
        """Compile nothing yet.

        options: those of torch.compile; falls_back: run stock layers if the first compilation
        fails, instead of raising; fp8: multiply in fp8.
        """
        self._settings, self.fp8 = (options, falls_back, fp8), fp8
        self.failure = ""
        """How the compilation failed."""
        self._logged_group, self._works = False, False
        options = {"backend": recompute_backend, **options}
        products = Fp8Linears() if fp8 else nullcontext()
        self._compiled = cache(lambda stock: _compile(stock, products, options))

    def __reduce__(self) -> tuple:
        return CompiledForward, self._settings

    def __call__(self, layer: nn.Module, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.fp8 and layer.training and _function_mode_active():
            raise ValueError("fp8=True: batch_invariant needs the weights' precision; omit fp8")
        if not layer.training or self.failure or _runs_eagerly():
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
        check_lengths(_configured(layer), boundaries)
        _mark_dynamic((args, kwargs), x.shape[1], boundaries.cu_seqlens)
        max_length: Any = torch.tensor(boundaries.max_length)
        packed = {"cu_seq_lens_q": boundaries.cu_seqlens, "max_length_q": max_length}
        context = nullcontext()
        if current_varlen(layer) is not None or pass_boundaries in added_forwards(type(layer)):
            context = forward_context(Varlen(boundaries.cu_seqlens, max_length))
        try:
            with context, torch._dynamo.config.patch(DYNAMO):
                out, router_logits = self._compiled(stock)(layer, *args, **{**kwargs, **packed})
        except TorchDynamoException as error:
            if self._works or not self._settings[1]:
                raise
            self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            log.warning("layers run uncompiled: torch.compile failed (%s)", self.failure)
            return None
        self._works = True
        collect_router_logits(router_logits)
        return out


def _runs_eagerly() -> bool:
    """Whether this forward needs stock layers: in an outer graph, or for what no graph returns."""
    return torch.compiler.is_compiling() or wants_other_outputs() or _function_mode_active()


def _function_mode_active() -> bool:
    """Whether torch's functions are replaced, as in batch-invariant mode."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _compile(stock: Callable, products: Any, options: dict[str, Any]) -> Callable:
    wait_for_inductor()
    return torch.compile(_bind(stock, products), **options)


def _bind(stock: Callable, products: Any) -> Callable:
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, list]:
        with products:
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
        if isinstance(x, Tensor) and tokens in x.shape:
            torch._dynamo.maybe_mark_dynamic(x, x.shape.index(tokens))


def recompute_backend(
    graph: Any, inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """Compile by torch.compile's own backend, set to keep little for the backward."""
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx

    # Inductor times variants of some kernels and takes the fastest: a resumed run could take others
    # that round differently.
    settings: dict[str, Any] = {"deterministic": True}
    settings |= torch._inductor.list_mode_options(mode) if mode else {}
    settings |= options or {}
    # With adapters, the input of a product feeds a second one: "used far apart", hence kept.
    keep_little = {
        "ban_recompute_materialized_backward": False,
        "ban_recompute_used_far_apart": False,
    }
    with functorch.patch(keep_little):
        return compile_fx(graph, inputs, config_patches=settings)
