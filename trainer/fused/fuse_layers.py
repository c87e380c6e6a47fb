"""Use fused training kernels in an existing model, without torch.compile.

    norms, gated MLPs        one kernel each way
    decoder layers           residuals are added inside the norms' kernels, each way
    rotary embeddings        queries and keys in one kernel
    attention                input gradients of q, k and v are summed inside their products

Modules are recognized by their structure alone, so every replacement is verified first: on a small
input, with gradients, against the module itself. A module that does not match keeps its own
forward. A compiled layer does not use the kernels: torch.compile generates its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import STOCK_CLASS, gather_objects
from .class_swap import FusedLayers, add_forward, can_run, fused_forwards, settings
from .compile_layers import CompiledForward
from .fusion_patterns import PARTS, RotaryPart
from .rotary_patch import FUNCTION

log = logging.getLogger("nopad.trainer")


def fuse_layers(model: nn.Module, device: torch.device | None = None) -> FusedLayers:
    """Use fused kernels for the modules of a causal LM on a GPU that they reproduce.

    Call it before FSDP1 or ZeRO-3 wrap the model, before or after DDP or FSDP2 do (then on every
    rank), and before or after PEFT adds adapters. Compiled layers stay unchanged: torch.compile
    generates its own kernels. Weights and their names stay.

    Args:
        model: a causal LM of Transformers.
        device: the device on which the model will train; default: its current one.
    """
    fused, device = FusedLayers(), device or next(model.parameters()).device
    if not can_run(torch.empty(0, device=device)):
        if device.type == "cuda":
            log.warning("no fused kernels on %s: it is not the current device", device)
        return fused
    try:
        _fuse_parts(model, fused, device)
    except BaseException:
        fused.undo()
        raise
    if fused.names:
        log.info("fused kernels: %s", ", ".join(fused.names))
    else:
        log.warning("no fused kernels fit %s: it trains with stock layers", type(model).__name__)
    return fused


def _fuse_parts(model: nn.Module, fused: FusedLayers, device: torch.device) -> None:
    for name in sorted(set(_fused_names(model))):
        fused.add_name(name)
    eager = list(_eager_modules(model))
    for part in PARTS:
        for cls in _classes(eager, part):
            modules = [module for module in eager if type(module) is cls]
            fused_class = add_forward(cls, part.forward)
            if all(_verify(part, module, fused_class, device) for module in _distinct(modules)):
                fused.add_name(_name(part, cls))
                for module in modules:
                    fused.swap(module, fused_class)


def _fused_names(model: nn.Module) -> Iterator[str]:
    """Yield the modules that an earlier call has fused."""
    for module in model.modules():
        for forward in fused_forwards(type(module)):
            part = next((part for part in PARTS if part.forward is forward), None)
            yield _name(part, type(module))


def _name(part: Any, cls: type) -> str:
    return FUNCTION if part is RotaryPart else cls.__name__


def _verify(part: Any, module: nn.Module, *args: Any) -> bool:
    """Whether a part's check passes; a module that fails in its trial is not fused."""
    try:
        verdict = part.verify(module, *args)
    except Exception as error:
        log.info("no fused kernels (%s: %s)", type(error).__name__, error)
        verdict = False
    if any(hasattr(p, "full_tensor") for p in module.parameters()):
        return all(gather_objects(verdict))  # ranks that share weights gather them together
    return verdict


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are not part of a compiled one, each once."""
    compiled = {
        id(inner)
        for outer in module.modules()
        if outer._compiled_call_impl is not None or _is_compiled_layer(outer)
        for inner in outer.modules()
    }
    return (inner for inner in module.modules() if id(inner) not in compiled)


def _is_compiled_layer(module: nn.Module) -> bool:
    return any(isinstance(forward, CompiledForward) for forward in fused_forwards(type(module)))


def _classes(modules: list[nn.Module], part: Any) -> list[type]:
    """Return the classes a part matches and has not fused yet, in the order of the modules."""
    classes = (type(module) for module in modules if part.matches(module))
    return [
        cls
        for cls in dict.fromkeys(classes)
        if part.forward not in fused_forwards(cls) and not _is_wrapped(cls)
    ]


def _is_wrapped(cls: type) -> bool:
    """Whether someone else has subclassed a fused class, as fully_shard does."""
    return hasattr(cls, STOCK_CLASS) and STOCK_CLASS not in vars(cls)


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return one module per shape and setting, and all that have tensors besides their weights."""
    keys: dict[tuple, nn.Module] = {}
    for module in modules:
        keys[_shapes(module), _attributes(module), _tensor_key(module)] = module
    return list(keys.values())


def _shapes(module: nn.Module) -> tuple:
    return tuple(p.shape for p in module.parameters())


def _attributes(module: nn.Module) -> tuple:
    """Return the settings of a module, and which other objects it refers to."""
    objects = {k: id(v) for k, v in vars(module).items() if not k.startswith("_")}
    plain = settings(module)
    return repr(plain), *((k, v) for k, v in objects.items() if k not in plain)


def _tensor_key(module: nn.Module) -> tuple:
    """Return the classes inside a module, and its id if it has tensors besides its parameters."""
    classes = tuple(type(inner) for inner in module.modules())
    values = (value for inner in module.modules() for value in vars(inner).values())
    has_tensors = any(isinstance(value, Tensor) for value in values)
    return classes, id(module) if has_tensors or any(True for _ in module.buffers()) else None
