"""`CompiledLayers`: torch.compile for decoder layers in generation, one graph per kind of layer.

    step ─▶ embedding ─▶ [ norm, products, rotary │ attention: one operator │ … ] × layers ─▶ logits

Attention reads the step from its context, so a graph depends neither on the pages nor on the layer.
The number of tokens is dynamic; one token is a graph of its own. Modules that keep a state cut the
graph of their layer and are compiled alone. Such layers are compiled in captured decode steps only:
in other steps these modules run once for every prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import Varlen
from ...attention.hf import (
    STEP,
    current_rows,
    current_varlen,
    forward_context,
    is_recording,
    running_layer,
)
from ...runtime import stock_class
from ..execution.capture import is_capturing
from ..live_model.patches import Patches

DYNAMO = {"recompile_limit": 256}
"""Settings of torch.compile: by default, the ninth graph of a process raises. Layers of all kinds
and models count together: their forwards share the code of `_bind`."""


class CompiledLayers:
    """Compiled forwards of one model's decoder layers."""

    __name__ = "compiled layers"

    def __init__(self, stateful: Collection[nn.Module] = (), **options: Any):
        """Compile nothing yet.

        stateful: the modules that keep a state; options: those of torch.compile.
        """
        self._stateful = stateful
        self._runs_compiled = False
        """Whether a layer that runs now is compiled."""
        options = {"fullgraph": not stateful, **options}
        self._compiled = cache(lambda stock: torch.compile(_bind(stock), **options))
        self._compiled_alone = cache(lambda stock: torch.compile(stock, **options))

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        for index, layer in enumerate(_decoder_layers(modules)):
            patches.set(layer, "forward", partial(self._forward, layer, _cache_layer(layer, index)))
        for module in self._stateful:
            stock = partial(stock_class(module).forward, module)
            before = vars(module).get("forward", stock)
            if isinstance(before, partial):
                forward = partial(self._run_alone, before.func, module)
                vars(forward).update(vars(before))
                patches.set(module, "forward", forward)

    def _forward(self, layer: Any, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        from_context = current_varlen(layer)
        varlen = kwargs.get("varlen") or from_context
        if varlen is None or varlen.pages is None or is_recording() or self._is_eager(varlen):
            return type(layer).forward(layer, x, *args, **kwargs)
        _mark_dynamic((x, args, kwargs), x.shape[1])
        context = nullcontext() if from_context is None else forward_context(STEP)
        alike = _numbered_alike([m for m in layer.modules() if m in self._stateful])
        self._runs_compiled = True
        try:
            with running_layer(varlen, index), context, alike, torch._dynamo.config.patch(DYNAMO):
                return self._compiled(type(layer).forward)(
                    layer, x, *args, **{**kwargs, "varlen": STEP}
                )
        finally:
            self._runs_compiled = False

    def _run_alone(self, stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module that keeps a state, on one token [B, 1, D] of each sequence."""
        if not self._runs_compiled:
            return stock(module, *args, **kwargs)
        _mark_dynamic((args, kwargs), len(current_rows()))
        return self._compiled_alone(stock)(module, *args, **kwargs)

    def _is_eager(self, varlen: Varlen) -> bool:
        """Whether states are kept, and this is no captured decode step."""
        return bool(self._stateful) and not (is_capturing() and varlen.max_length == 1)


@contextmanager
def _numbered_alike(stateful: Sequence[Any]) -> Iterator[None]:
    """Let modules be those of layer 0 inside: a graph would hold for the number that it has read.

    Their cache has the states of one layer, in every place.
    """
    before = [module.layer_idx for module in stateful]
    for module in stateful:
        module.layer_idx = 0
    try:
        yield
    finally:
        for module, number in zip(stateful, before, strict=True):
            module.layer_idx = number


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
