"""Fused kernels for training without torch.compile: norms, gated MLPs, rotary embeddings.

Nothing is known about a model but what its modules look like, so every replacement is proven
first: on a small input, with its gradients, against the module itself. What does not agree stays as
it is. A compiled layer does not use them: it makes kernels of its own.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from copy import deepcopy
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("nopad.trainer")

FUSED = "_nopad_fused"
"""Marks a class or function that has fused kernels already."""


class FusedLayers:
    """What `fuse_layers` has put in place."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the classes and functions that have fused kernels now."""
        self._undo = ExitStack()

    def undo(self) -> None:
        """Give the model back as it was."""
        self._undo.close()
        self.names = []

    def put(self, owner: Any, attribute: str, value: Any) -> None:
        self._undo.callback(setattr, owner, attribute, getattr(owner, attribute))
        setattr(owner, attribute, value)


def fuse_layers(model: nn.Module, device: torch.device | None = None) -> FusedLayers:
    """Give the parts of a causal LM on a GPU fused kernels, where they compute the same.

    Call it before DDP or FSDP wrap the model. A part that PEFT gives adapters, before or after,
    keeps its own forward. Weights and their names stay. The rotary embedding is a function of the
    model's file: it is fused for every model of that file in this process, until `undo`.

    device: where the model will train; without it, where it is.
    """
    fused, device = FusedLayers(), device or next(model.parameters()).device
    if not serves(torch.empty(0, device=device)):
        return fused
    done = {type(part).__name__ for part in model.modules() if hasattr(type(part), FUSED)}
    fused.names += sorted(done)
    for kind, twin in _kinds(model):
        alike = [part for part in model.modules() if type(part) is kind]
        if all(_agrees(part, twin, device) for part in _different(alike)):
            fused.names.append(kind.__name__)
            for part in alike:
                fused.put(part, "__class__", twin)
    _fuse_rotary(model, fused, device)
    if fused.names:
        log.info("fused kernels: %s", ", ".join(fused.names))
    else:
        log.warning("no fused kernels fit %s: it trains with its own", type(model).__name__)
    return fused


def serves(x: Tensor) -> bool:
    """Whether the kernels are for this tensor, here."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _kinds(model: nn.Module) -> list[tuple[type, type]]:
    """The classes that look as if they could be fused, each with its fused twin."""
    kinds = {}
    for part in model.modules():
        if hasattr(type(part), FUSED):
            continue
        if _eps(part) is not None:
            kinds[type(part)] = _twin(type(part), _norm)
        elif {"gate_proj", "up_proj", "down_proj", "act_fn"} <= part._modules.keys():
            if not _plain(part):
                continue
            kinds[type(part)] = _twin(type(part), _mlp)
    return list(kinds.items())


@cache
def _twin(kind: type, fused: Callable[[Any, Tensor], Tensor | None]) -> type:
    """A subclass of the same name whose forward is fused where it can be."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        usual = len(args) == 1 and not options and isinstance(args[0], Tensor) and serves(args[0])
        out = fused(self, args[0]) if usual else None
        return kind.forward(self, *args, **options) if out is None else out

    def reduce(self: Any, protocol: Any) -> tuple:  # by name, a pickle would find the parent
        return _remade, (kind, fused), object.__reduce_ex__(self, protocol)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, FUSED: True})


def _remade(kind: type, fused: Callable[[Any, Tensor], Tensor | None]) -> Any:
    twin: Any = _twin(kind, fused)
    return object.__new__(twin)


def _eps(part: Any) -> float | None:
    if not type(part).__name__.endswith("RMSNorm") or getattr(part, "weight", None) is None:
        return None
    return getattr(part, "variance_epsilon", getattr(part, "eps", None))


def _norm(part: Any, x: Tensor) -> Tensor | None:
    from .triton_norm import rms_norm

    eps = _eps(part)
    plain = eps is not None and x.dtype == part.weight.dtype
    return rms_norm(x, part.weight, eps) if plain and eps is not None else None


def _mlp(part: Any, x: Tensor) -> Tensor | None:
    from .triton_gate import gated_mlp

    if not _plain(part):
        return None
    products = (part.gate_proj, part.up_proj, part.down_proj)
    inputs = (x, *(p.weight for p in products))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(tensor.to(dtype) for tensor in inputs)
    return gated_mlp(*inputs)


def _plain(part: Any) -> bool:
    """No adapter, no quantized weight, no hook that has to run before a weight is there."""
    products = (part.gate_proj, part.up_proj, part.down_proj)
    own = all(type(p) is nn.Linear and p.bias is None for p in products)
    return own and not any(p._forward_hooks or p._forward_pre_hooks for p in products)


def _different(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """One of each shape."""
    by_shape = {tuple(p.shape for p in part.parameters()): part for part in parts}
    return list(by_shape.values())


def _agrees(part: Any, twin: Any, device: torch.device) -> bool:
    """Run one module both ways, where it will train."""
    if any(p.is_meta for p in part.parameters()):
        return False
    part = deepcopy(part).to(device)
    weights = list(part.parameters())
    x = _wave(weights[0], 1, 5, weights[0].shape[-1])
    return _near(partial(type(part).forward, part), partial(twin.forward, part), [x], weights)


def _near(
    stock: Callable[..., Any], fused: Callable[..., Any], inputs: list[Tensor], weights: list[Any]
) -> bool:
    """Whether two functions have the same results and gradients, nearly."""
    try:
        with torch.enable_grad():
            pairs = zip(*(_outcome(f, inputs, weights) for f in (stock, fused)), strict=True)
            errors = [((a - b).norm() / a.norm().clamp(min=1e-9)).item() for a, b in pairs]
    except Exception as error:  # whatever a foreign module makes of it, the kernels are not for it
        log.info("no fused kernels (%s: %s)", type(error).__name__, error)
        return False
    limit = 1e-4 if inputs[0].dtype == torch.float32 else 4e-2
    return all(error < limit for error in errors)  # unlike max, false where one is no number


def _outcome(call: Callable[..., Any], inputs: list[Tensor], weights: list[Any]) -> list[Tensor]:
    out = call(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    given = [x for x in (*inputs, *weights) if x.requires_grad]
    rises = [_wave(o, *o.shape).detach().mul(3).cos() for o in outs]  # not along the inputs
    grads = torch.autograd.grad(outs, given, rises)
    return [tensor.detach().float() for tensor in (*outs, *grads)]


def _wave(like: Tensor, *shape: int) -> Tensor:
    """Numbers to try something with, without touching a random state."""
    numbers = torch.linspace(-9, 9, math.prod(shape), device=like.device).sin()
    return numbers.view(shape).to(like.dtype).requires_grad_()


def _fuse_rotary(model: Any, fused: FusedLayers, device: torch.device) -> None:
    """Where the model's file has the usual function, let it be fused for the usual arguments."""
    from .triton_rotary import rotary

    weight = torch.empty(0, device=device, dtype=next(model.parameters()).dtype)
    q, k = (_wave(weight, 1, 5, heads, 16).transpose(1, 2) for heads in (4, 2))
    angles = _wave(weight, 1, 5, 8).detach().float().repeat(1, 1, 2)
    inputs = [q, k, angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)]
    for source in {sys.modules[type(part).__module__] for part in model.modules()}:
        stock = getattr(source, "apply_rotary_pos_emb", None)
        if hasattr(stock, FUSED):
            fused.names.append("apply_rotary_pos_emb")
        elif stock is not None and _near(stock, rotary, inputs, []):
            fused.names.append("apply_rotary_pos_emb")
            fused.put(source, "apply_rotary_pos_emb", _rotary_or(stock))


def _rotary_or(stock: Callable[..., Any]) -> Callable[..., Any]:
    from .triton_rotary import rotary

    @wraps(stock)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or not (serves(q) and _usual(q, k, cos, sin)):
            return stock(q, k, cos, sin, *more, **options)
        return rotary(q, k, cos, sin)

    setattr(apply, FUSED, True)
    return apply


def _usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """One row, all of a head's width turned, one dtype."""
    whole = cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and q.shape[0] == 1
    return whole and q.dtype == k.dtype == cos.dtype and cos.is_contiguous() and sin.is_contiguous()
