"""Queries, keys and values by one matrix product: their weights, copied end to end.

Alone, each of the three is too small to fill a device. The copies cost a few per cent of the
model's memory and are refreshed whenever the engine takes the model; parameters stay untouched.

    x ─▶ [ Wq ; Wk ; Wv ] ─▶ q | k | v        q_proj computes all, k_proj and v_proj hand theirs out
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..live_model.patches import Patches


class QKVWeights:
    """The stacked weights of one model, always at the same place: graphs hold addresses."""

    __name__ = "projections"

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}
        self._owners: dict[nn.Module, _Layer] = {}

    def __call__(self, modules: Sequence[nn.Module], places: Patches, stale: bool) -> None:
        """Let the copies stand in for the projections, brought up to date first if stale."""
        self._owners = {}
        for index, module in enumerate(modules):
            trio = _trio(module)
            if trio:
                layer = self._layers.setdefault(index, _Layer())
                if stale:
                    layer.refresh(trio)
                layer.stand_in(trio, places)
                self._owners[module] = layer

    def weights(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The stacked weight and bias of an attention module, while they are in place."""
        layer = self._owners[module]
        assert layer.weight is not None
        return layer.weight, layer.bias


def stacked_bytes(model: nn.Module, itemsize: int) -> int:
    """What the copies of a model take."""
    size = 0
    for module in model.modules():
        size += sum(linear.weight.numel() for linear in _trio(module)) * itemsize
    return size


def _trio(module: nn.Module) -> list[Any]:
    """A module's three projections, if it has them and they are plain."""
    trio = [module._modules.get(name) for name in ("q_proj", "k_proj", "v_proj")]
    return trio if all(type(linear) is nn.Linear for linear in trio) else []


class _Layer:
    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def refresh(self, trio: list[nn.Linear]) -> None:
        self.weight = _joined(self.weight, [linear.weight for linear in trio])
        biases = [linear.bias for linear in trio]
        assert len({bias is None for bias in biases}) == 1, "only some projections have a bias"
        self.bias = None if biases[0] is None else _joined(self.bias, biases)

    def stand_in(self, trio: list[nn.Linear], places: Patches) -> None:
        sizes = [linear.out_features for linear in trio]
        places.on_restore(self._forget)
        places.set(trio[0], "forward", partial(self._first, sizes=sizes))
        for place in (1, 2):
            later = partial(self._later, place=place, linear=trio[place])
            places.set(trio[place], "forward", later)

    def _forget(self) -> None:
        self._kept = {}

    def _first(self, x: Tensor, sizes: list[int]) -> Tensor:
        assert self.weight is not None
        q, k, v = F.linear(x, self.weight, self.bias).split(sizes, dim=-1)
        self._kept = {1: (x, k), 2: (x, v)}
        return q

    def _later(self, x: Tensor, place: int, linear: nn.Linear) -> Tensor:
        asked, found = self._kept.pop(place, (None, None))
        return found if found is not None and asked is x else nn.Linear.forward(linear, x)


def _joined(into: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    """Lay parts end to end, in the same memory as before if it fits."""
    rows = sum(len(part) for part in parts)
    if into is None or len(into) != rows or into.dtype != parts[0].dtype:
        into = parts[0].new_empty(rows, *parts[0].shape[1:])
    return torch.cat([part.detach() for part in parts], out=into)
