"""Fused kernels in place of a model's small operations, while the engine has the model.

Nothing is known about a model but what its modules look like, so every replacement is proven: the
model runs once with and once without it, and what does not agree is not used. On leaving, the
modules are as they were.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Varlen, carry
from .borrow import borrowed

log = logging.getLogger("nopad.inference")

Part = Callable[[nn.Module, ExitStack], None]


def provable_parts(model: Any) -> list[Part]:
    """The replacements that leave this model's logits as they are; none on a CPU."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return []
    proven: list[Part] = []
    with borrowed(model):
        want = _logits(model, device)
        for part in (_norms, _gates, _rotaries):
            if _agrees(model, part, want):
                proven.append(part)
    names = [part.__name__.strip("_") for part in proven]
    log.info("fused kernels: %s", ", ".join(names) or "none fit this model")
    return proven


@contextmanager
def fused(model: nn.Module, parts: list[Part]) -> Iterator[None]:
    """Let fused kernels stand in for the model's own operations."""
    with ExitStack() as stack:
        for part in parts:
            part(model, stack)
        yield


def _agrees(model: Any, part: Part, want: Tensor) -> bool:
    try:
        with fused(model, [part]):
            got = _logits(model, want.device)
    except Exception as error:  # whatever a foreign module makes of it, the part is not for it
        log.info("fused %s: not for this model (%s)", part.__name__, type(error).__name__)
        return False
    tight = 1e-4 if want.dtype == torch.float32 else 4e-2
    wrong = (got.float() - want.float()).norm() / want.float().norm()
    return bool(wrong < tight)


def _logits(model: Any, device: torch.device) -> Tensor:
    """Logits of two short sequences, without any cache."""
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], device=device)
    ids = (positions * 7 + 3) % model.config.get_text_config().vocab_size
    varlen = Varlen(bounds, 5)
    with carry(varlen):
        out = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, varlen=varlen
        )
    return out.logits


def _norms(model: nn.Module, stack: ExitStack) -> None:
    from .fused_kernels import rms_norm

    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None:
            continue

        def forward(x: Tensor, weight: Tensor = weight, eps: float = eps) -> Tensor:
            return rms_norm(x, weight, eps)

        _replace(module, "forward", forward, stack)


def _gates(model: nn.Module, stack: ExitStack) -> None:
    from .fused_kernels import silu_mul

    for module in model.modules():
        names = ("gate_proj", "up_proj", "down_proj", "act_fn")
        if not all(hasattr(module, name) for name in names):
            continue

        def forward(x: Tensor, m: Any = module) -> Tensor:
            return m.down_proj(silu_mul(m.gate_proj(x), m.up_proj(x)))

        _replace(module, "forward", forward, stack)


def _rotaries(model: nn.Module, stack: ExitStack) -> None:
    from .fused_kernels import rotary

    files = {type(module).__module__ for module in model.modules()}
    for source in [sys.modules[name] for name in files]:
        if not hasattr(source, "apply_rotary_pos_emb"):
            continue

        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
            assert unsqueeze_dim == 1 and q.shape[0] == 1 and cos.shape[-1] == q.shape[-1]
            return rotary(q, k, cos, sin)

        _replace(source, "apply_rotary_pos_emb", apply, stack)


def _replace(owner: Any, name: str, value: Any, stack: ExitStack) -> None:
    """Set an attribute of one object, and have it as it was when the stack unwinds."""
    if isinstance(owner, nn.Module):
        if name in owner.__dict__:
            return  # someone wrapped it: theirs stays
        stack.callback(owner.__dict__.pop, name, None)
        owner.__dict__[name] = value
    else:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
