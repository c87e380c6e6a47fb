"""Compiled layers: hooks have their effect, and router logits are returned by the graph.

Transformers' hooks append router outputs to a list in a ContextVar, which torch.compile cannot
trace. Inside a layer's graph the hooks get a list of their own, and the graph returns it; outside,
it is added to the list of the forward. By default, a graph ignores hooks of modules in the layer
that come after its first call: here it is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector, maybe_install_capturing_hooks

from .forward_context import current_varlen

KEY, CONFIG_NAME = "router_logits", "output_router_logits"


def has_router_logits(model: nn.Module) -> bool:
    """Return whether a model can return router logits, for its auxiliary loss."""
    return any(hasattr(part.config.get_text_config(), CONFIG_NAME) for part in _pretrained(model))


def compile_with_hooks(model: nn.Module, layers: nn.ModuleList, **options: Any) -> None:
    """Compile the layers of a model such that hooks work and router logits can be collected.

    options: those of torch.compile.
    """
    for part in _pretrained(model):
        maybe_install_capturing_hooks(part)  # a graph does not see hooks that come later
    for layer in layers:
        layer._compiled_call_impl = _CompiledLayer(layer, torch.compile(_call_layer, **options))


def _pretrained(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


class _CompiledLayer:
    """Calls a compiled layer, and collects its router logits if the forward wants them.

    A forward without boundaries, such as `generate`, runs eagerly: a graph cannot read positions.
    """

    def __init__(self, layer: nn.Module, compiled: Callable):
        self._layer, self._compiled = layer, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seq_lens_q") is None and current_varlen(self._layer) is None:
            return self._layer._call_impl(*args, **kwargs)
        wanted = _active_collector.get() or {}
        if wanted.keys() - {KEY}:
            names = ", ".join(f"output_{name}" for name in wanted.keys() - {KEY})
            raise ValueError(f"compiled layers cannot return {names}: do not ask for it")
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            out, router_logits = self._compiled(self._layer, *args, **kwargs)
        if KEY in wanted:
            wanted[KEY].extend(router_logits)
        return out


def _call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list]:
    collected: dict[str, list] = {KEY: []}
    before = _active_collector.set(collected)
    try:
        out = layer._call_impl(*args, **kwargs)
    finally:
        _active_collector.reset(before)
    return out, collected[KEY]
