"""Use a model that is being trained, and hand it back as it was.

Everything the engine changes for its forwards is noted first and put back whatever happens: the
training flag of each submodule, the attention implementation, the random states (Python, NumPy,
torch on each device), the current device, autocast and gradient mode. Gradients, weights, dtypes
and hooks are not touched at all; gradient checkpointing sleeps while a layer is not in training
mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...runtime import preserve_rng

ATTENTION = "nopad"


@contextmanager
def borrow_model(
    model: nn.Module,
    autocast: torch.dtype | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> Iterator[None]:
    """Set a model up for generation; on leaving, nothing shows that it was.

    modules: all of the model's, if the caller has them at hand: finding them takes a while.
    """
    device = next(model.parameters()).device
    modules = list(model.modules()) if modules is None else modules
    with ExitStack() as stack:
        # What is made here, pages of the cache for instance, outlives the caller's mode.
        stack.enter_context(torch.inference_mode(False))
        if device.type == "cuda":  # kernels are launched on the current device, wherever data lies
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(preserve_rng(device))
        stack.enter_context(_training_flags(modules))
        stack.enter_context(_attention(modules))
        stack.enter_context(torch.no_grad())
        dtype = autocast or torch.bfloat16
        stack.enter_context(
            torch.autocast(device.type, dtype, enabled=autocast is not None, cache_enabled=False)
        )
        yield


@contextmanager
def _training_flags(modules: Sequence[nn.Module]) -> Iterator[None]:
    # The flag itself, not train()/eval(): some modules override those and do more.
    training = [vars(module) for module in modules if module.training]
    try:
        for own in training:
            own["training"] = False
        yield
    finally:
        for own in training:
            own["training"] = True


@contextmanager
def _attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    # Layers read the name from their config at each call; setting it there, and not through
    # set_attn_implementation, has no side effects to undo.
    configs = {id(c): c for m in modules if (c := vars(m).get("config")) is not None}
    before = [
        (config, config._attn_implementation_internal)
        for config in configs.values()
        if hasattr(config, "_attn_implementation_internal")
    ]
    try:
        for config, _ in before:
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
