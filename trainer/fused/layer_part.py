"""Decoder layers whose residuals are added in their norms' kernels.

    x ─┬─ norm ─ attention ─┬─ norm ─ mlp ─┐       forward: + and norm in one pass
       └────────────────────+──────────────+─▶     backward: what comes past a norm is added in it

The attention is not tried, since nobody knows what it asks for: a stand-in takes its place, and
must be given the same by both. So a layer that scales, drops out or caps anything does not agree.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .class_swap import FUSED, has_no_hooks, serves
from .equivalence import agree, copies, wave
from .norm_part import eps_of

NAMES = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"


def matches(part: Any) -> bool:
    return set(NAMES) == part._modules.keys() and all(map(_fused, _norms(part)))


def forward(part: Any, *args: Any, **options: Any) -> Tensor | None:
    if len(args) != 1 or not serves(args[0]):
        return None
    x, norms = args[0], _norms(part)
    if not all(_fused(norm) and norm.weight.dtype == x.dtype for norm in norms):
        return None
    from ...kernels.norm import passed_norm

    first, second = norms
    x, normed = passed_norm(x, None, first.weight, eps_of(first) or 0.0)
    attended = part.self_attn(hidden_states=normed, **options)[0]
    x, normed = passed_norm(x, attended, second.weight, eps_of(second) or 0.0)
    return x + part.mlp(normed)


def agrees(part: Any, twin: Any, device: torch.device) -> bool:
    """Run one layer both ways, where it will train, with a stand-in for the attention."""
    shell = copy(part)
    shell._modules = {**part._modules, "self_attn": _StandIn()}
    return all(_agrees(shell, twin) for shell in copies(shell, device))


def _agrees(shell: Any, twin: Any) -> bool:
    weights = list(shell.parameters())
    x = wave(weights[0], 1, 5, _norms(shell)[0].weight.shape[-1])
    names = "attention_mask", "position_ids", "position_embeddings", "cu_seq_lens_q"
    options = {name: object() for name in names}
    stock, fused = (partial(kind.forward, shell, **options) for kind in (type(shell), twin))
    given = shell.self_attn.given
    return agree(stock, fused, [x], weights) and len(given) == 2 and given[0] == given[1]


class _StandIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict] = []

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        self.given.append({k: v for k, v in options.items() if v is not None and v is not False})
        return hidden_states.cos(), None


def _norms(part: Any) -> tuple[Any, Any]:
    return part.input_layernorm, part.post_attention_layernorm


def _fused(norm: Any) -> bool:
    return hasattr(type(norm), FUSED) and has_no_hooks(norm) and eps_of(norm) is not None
