"""`CompiledLayers`: torch.compile for decoder layers in generation, one graph per kind of layer.

    step ─▶ embedding ─▶ [ norm, products, rotary │ attention: one operator │ … ] × layers ─▶ logits

Attention reads the step from its context, so a graph depends neither on the pages nor on the layer.
The number of tokens is dynamic; one token is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf import STEP, current_varlen, forward_context, is_recording, running_layer
from ..live_model.patches import Patches

DYNAMO = {"recompile_limit": 256}
"""Settings of torch.compile: by default, the ninth graph of a process raises. Layers of all kinds
and models count together: their forwards share the code of `_bind`."""


class CompiledLayers:
    """Compiled forwards of one model's decoder layers."""

    __name__ = "compiled layers"

    def __init__(self, **options: Any):
        """Compile nothing yet; options: those of torch.compile."""
        self._compiled = cache(lambda stock: torch.compile(_bind(stock), fullgraph=True, **options))

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        for index, layer in enumerate(_decoder_layers(modules)):
            patches.set(layer, "forward", partial(self._forward, layer, _cache_layer(layer, index)))

    def _forward(self, layer: Any, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        from_context = current_varlen(layer)
        varlen = kwargs.get("varlen") or from_context
        if varlen is None or varlen.pages is None or is_recording():
            return type(layer).forward(layer, x, *args, **kwargs)
        _mark_dynamic((x, args, kwargs), x.shape[1])
        context = nullcontext() if from_context is None else forward_context(STEP)
        with running_layer(varlen, index), context, torch._dynamo.config.patch(DYNAMO):
            return self._compiled(type(layer).forward)(
                layer, x, *args, **{**kwargs, "varlen": STEP}
            )


def _bind(stock: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return forward


def _decoder_layers(modules: Sequence[nn.Module]) -> Any:
    lists = (module for module in modules if isinstance(module, nn.ModuleList))
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))


def _cache_layer(layer: nn.Module, index: int) -> int:
    found = (vars(module).get("layer_idx") for module in layer.modules())
    return next((number for number in found if number is not None), index)


def _mark_dynamic(inputs: Any, tokens: int) -> None:
    for x in torch.utils._pytree.tree_leaves(inputs):
        if isinstance(x, Tensor):
            dim = next((dim for dim in range(x.ndim) if x.shape[dim] == tokens), None)
            if dim is not None:
                torch._dynamo.maybe_mark_dynamic(x, dim)
