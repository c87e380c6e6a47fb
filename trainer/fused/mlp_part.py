"""Gated MLPs, fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .class_swap import is_plain_linear, serves
from .equivalence import agrees as agrees

NAMES = "gate_proj", "up_proj", "down_proj"


def matches(part: Any) -> bool:
    return {*NAMES, "act_fn"} <= part._modules.keys() and _plain(part)


def forward(part: Any, *args: Any, **options: Any) -> Tensor | None:
    if len(args) != 1 or options or not serves(args[0]) or not _plain(part):
        return None
    from ...kernels.swiglu import gated_mlp

    x = args[0]
    inputs = (x, *(getattr(part, name).weight for name in NAMES))
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inputs = tuple(tensor.to(dtype) for tensor in inputs)
    return gated_mlp(*inputs)


def _plain(part: Any) -> bool:
    products = [getattr(part, name) for name in NAMES]
    return all(is_plain_linear(p) and p.bias is None for p in products)
