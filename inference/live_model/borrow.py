"""Put a model in training into generation state, and restore it: modes, attention, random states.

Everything the engine changes for its forwards is saved first and restored in any case: the training
flag of each submodule, compiled forwards, the attention implementation, rotary frequencies that
depend on the length, the random states (Python, NumPy, torch on each device), the current device,
autocast and gradient mode. Gradients, weights, dtypes and hooks are not touched; gradient
checkpointing is inactive in layers that are not in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...attention.hf import frozen_rotary, nopad_attention
from ...runtime import preserve_rng
from .model_lock import model_lock


@contextmanager
def borrow_model(
    model: nn.Module,
    autocast: torch.dtype | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> Iterator[None]:
    """Set a model up for generation, and leave no trace on exit; other threads wait meanwhile.

    modules: all modules of the model, if the caller has them: collecting them takes time.
    """
    device = next(model.parameters()).device
    modules = list(model.modules()) if modules is None else modules
    with ExitStack() as stack:
        stack.enter_context(model_lock(model))
        # Tensors created here, such as cache pages, outlive the caller's inference mode.
        stack.enter_context(torch.inference_mode(False))
        if device.type == "cuda":  # kernels run on the current device, not on that of their data
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(preserve_rng(device))
        stack.enter_context(eager_calls(modules))
        stack.enter_context(_eval_mode(modules))
        stack.enter_context(nopad_attention(modules))
        stack.enter_context(frozen_rotary(modules))
        stack.enter_context(torch.no_grad())
        dtype = autocast or torch.bfloat16
        stack.enter_context(
            torch.autocast(device.type, dtype, enabled=autocast is not None, cache_enabled=False)
        )
        yield


@contextmanager
def _eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    # Set the flag itself: some modules override train() and eval() and do more there, and
    # wrappers of torch.compile have none of their own.
    training = [own for module in modules if (own := module.__dict__).get("training")]
    try:
        for attributes in training:
            attributes["training"] = False
        yield
    finally:
        for attributes in training:
            attributes["training"] = True


@contextmanager
def eager_calls(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Bypass `module.compile()`, `torch.compile(module)` and compiled forwards inside.

    Compiled code is specialized to the shapes of training, and would compile again for every step.
    The engine has its own fused kernels and CUDA graphs, and must see each attention layer being
    called.
    """
    # At every step, over all modules: plain dict lookups.
    calls = [
        (attributes, call)
        for module in modules
        if (call := (attributes := module.__dict__).get("_compiled_call_impl")) is not None
    ]
    forwards = [
        (attributes, forward)
        for module in modules
        if (forward := (attributes := module.__dict__).get("forward")) is not None
        and hasattr(forward, "_torchdynamo_orig_callable")
    ]
    try:
        for attributes, _ in calls:
            attributes["_compiled_call_impl"] = None
        for attributes, forward in forwards:
            attributes["forward"] = forward._torchdynamo_orig_callable
        yield
    finally:
        for attributes, call in calls:
            attributes["_compiled_call_impl"] = call
        for attributes, forward in forwards:
            attributes["forward"] = forward
