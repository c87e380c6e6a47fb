"""Fused kernels for training without torch.compile, put into a model as it stands.

    norms, gated MLPs        a kernel each way
    decoder layers           residuals are added in the norms' kernels, either way
    attention                gradients of queries, keys and values meet inside their products
    rotary embeddings        queries and keys in one kernel

Nothing is known about a model but what its modules look like, so every replacement is proven
first: on a small input, with its gradients, against the module itself. What does not agree stays as
it is. A compiled layer does not use them: it makes kernels of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from . import attention_part, layer_part, mlp_part, norm_part
from .class_swap import FUSED, fused_subclass, serves
from .equivalence import agree, wave

log = logging.getLogger("nopad.trainer")

PARTS = norm_part, mlp_part, layer_part, attention_part
"""What is fused, in this order: a layer needs norms that are."""


class FusedLayers:
    """What `fuse_layers` has put in place."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the classes and functions that have fused kernels now."""
        self._put: list[tuple[Any, str, Any, Any]] = []
        """Owners and attributes, with what was there before and what is now."""

    def undo(self) -> None:
        """Give the model back as it was; before anything else is put round or over it."""
        for owner, attribute, _, now in self._put:
            found = getattr(owner, attribute)
            if found is not now:
                raise ValueError(
                    f"{attribute} of a {type(owner).__name__} is {found} by now, and not what was "
                    "put there: undo before fully_shard, or take that away first"
                )
        for owner, attribute, before, _ in reversed(self._put):
            setattr(owner, attribute, before)
        self._put, self.names = [], []

    def put(self, owner: Any, attribute: str, value: Any) -> None:
        self._put.append((owner, attribute, getattr(owner, attribute), value))
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
        if device.type == "cuda":
            log.warning("no fused kernels on %s: it is not the current device", device)
        return fused
    try:
        _fuse_parts(model, fused, device)
        _fuse_rotary(model, fused, device)
    except BaseException:
        fused.undo()
        raise
    if fused.names:
        log.info("fused kernels: %s", ", ".join(fused.names))
    else:
        log.warning("no fused kernels fit %s: it trains with its own", type(model).__name__)
    return fused


def _fuse_parts(model: nn.Module, fused: FusedLayers, device: torch.device) -> None:
    done = {type(part).__name__ for part in model.modules() if hasattr(type(part), FUSED)}
    fused.names += sorted(done)
    for source in PARTS:
        for kind in _kinds(model, source.matches):
            alike = [part for part in model.modules() if type(part) is kind]
            twin = fused_subclass(kind, source.forward)
            if all(_holds(source.agrees, part, twin, device) for part in _different(alike)):
                fused.names.append(kind.__name__)
                for part in alike:
                    fused.put(part, "__class__", twin)


def _holds(proof: Callable[..., bool], *given: Any) -> bool:
    """Whatever a foreign module makes of a trial, the kernels are not for it where it fails."""
    try:
        return proof(*given)
    except Exception as error:
        log.info("no fused kernels (%s: %s)", type(error).__name__, error)
        return False


def _kinds(model: nn.Module, matches: Callable[[nn.Module], bool]) -> list[type]:
    """The classes that look as if they could be fused, in the order they come."""
    parts = (part for part in model.modules() if not hasattr(type(part), FUSED))
    return list(dict.fromkeys(type(part) for part in parts if matches(part)))


def _different(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """One of each shape and setting; and all that have tensors beside their weights."""
    return list({(_shapes(part), _settings(part), _own(part)): part for part in parts}.values())


def _shapes(part: nn.Module) -> tuple:
    return tuple(p.shape for p in part.parameters())


def _settings(part: nn.Module) -> tuple:
    return tuple((k, v) for k, v in vars(part).items() if isinstance(v, bool | int | float | str))


def _own(part: nn.Module) -> tuple:
    kinds = tuple(type(module) for module in part.modules())
    tensors = any(isinstance(v, Tensor) for module in part.modules() for v in vars(module).values())
    return kinds, id(part) if tensors or any(True for _ in part.buffers()) else None


def _fuse_rotary(model: Any, fused: FusedLayers, device: torch.device) -> None:
    """Where the model's file has the usual function, let it be fused for the usual arguments."""
    from ...kernels.rotary import rotary

    dtypes = {next(model.parameters()).dtype, torch.float32}
    trials = [_angles_and_heads(torch.empty(0, device=device, dtype=dtype)) for dtype in dtypes]
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    for source in map(sys.modules.get, names):
        stock = getattr(source, "apply_rotary_pos_emb", None)
        if hasattr(stock, FUSED):
            fused.names.append("apply_rotary_pos_emb")
        elif stock is not None and all(_holds(agree, stock, rotary, given, []) for given in trials):
            fused.names.append("apply_rotary_pos_emb")
            fused.put(source, "apply_rotary_pos_emb", _rotary_or(stock))


def _angles_and_heads(like: Tensor) -> list[Tensor]:
    q, k = (wave(like, 1, 5, heads, 16).transpose(1, 2) for heads in (4, 2))
    angles = wave(like, 1, 5, 8).detach().float().repeat(1, 1, 2)
    return [q, k, angles.cos().to(like.dtype), angles.sin().to(like.dtype)]


def _rotary_or(stock: Callable[..., Any]) -> Callable[..., Any]:
    from ...kernels.rotary import rotary

    @wraps(stock)
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or not (serves(q) and _usual(q, k, cos, sin)):
            return stock(q, k, cos, sin, *more, **options)
        return rotary(q, k, cos, sin)

    setattr(apply, FUSED, True)
    return apply


def _usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """One row, all of a head's width turned, one dtype, angles that learn nothing."""
    if cos.requires_grad or sin.requires_grad:
        return False
    whole = cos.shape == sin.shape == (1, q.shape[2], q.shape[3]) and q.shape[0] == 1
    return whole and q.dtype == k.dtype == cos.dtype and cos.is_contiguous() and sin.is_contiguous()
