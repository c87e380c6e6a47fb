"""Context managers that switch a model to training or evaluation mode, or to `nopad` attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from .mask_patch import ATTN_IMPLEMENTATION


@contextmanager
def nopad_attention(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run the attention of these modules by `nopad` inside.

    Layers read the name from their config at each call. Unlike set_attn_implementation, setting it
    there has no side effects to undo.
    """
    configs = {id(c): c for m in modules if (c := m.__dict__.get("config")) is not None}
    before = [
        (attributes, attributes["_attn_implementation_internal"])
        for config in configs.values()
        if "_attn_implementation_internal" in (attributes := getattr(config, "__dict__", {}))
    ]
    try:
        for attributes, _ in before:
            attributes["_attn_implementation_internal"] = ATTN_IMPLEMENTATION
        yield
    finally:
        for attributes, name in before:
            attributes["_attn_implementation_internal"] = name


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and back into the mode it was in."""
    with module_mode(model, training=False):
        yield


@contextmanager
def module_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put every module in training or evaluation mode, and back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
