"""`StackedWeights`: copies of weights that multiply the same input, so that one product does.

Alone, the products of Q, K and V, or of the gates of a delta rule, are too small to fill a device.
The copies take memory beside the model's weights, from a few percent of them to a sixth in a hybrid
with delta rules, and are refreshed at every call of the engine; parameters are untouched.

    x ─▶ [ Wq ; Wk ; Wv ] ─▶ q | k | v      q_proj computes all; k_proj and v_proj return theirs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..live_model.patches import Patches, method

_QKV = "q_proj", "k_proj", "v_proj"
_DELTA_RULE = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
"""In the order in which they are called."""
_MEMBER = "_nopad_stacked"


class StackedWeights:
    """The stacked weights of one model, always at the same address: CUDA graphs hold addresses."""

    __name__ = "stacked projections"

    def __init__(self) -> None:
        self._stacks: dict[int, _Stack] = {}
        self._stack_of: dict[nn.Module, _Stack] = {}

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        """Copy the weights and replace the projections."""
        self._stack_of = {}
        for index, module in enumerate(modules):
            linears = _stackable(module)
            if linears:
                stack = self._stacks.setdefault(index, _Stack())
                stack.refresh(linears)
                patches.on_refresh(partial(stack.refresh, linears))
                stack.patch(linears, patches)
                self._stack_of[module] = stack
        assert self._stack_of, "no plain projections of one input"

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the stacked weight and bias of a module; only while applied."""
        stack = self._stack_of[module]
        assert stack.weight is not None
        return stack.weight, stack.bias


def stacked_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the bytes that the copies of a model take."""
    size = 0
    for module in model.modules():
        size += sum(linear.weight.numel() for linear in _stackable(module)) * itemsize
    return size


def _stackable(module: nn.Module) -> list[Any]:
    """Return a module's projections of one input if it has them and they are plain."""
    for names in (_QKV, _DELTA_RULE):
        linears = [module._modules.get(name) for name in names]
        if all(type(linear) is nn.Linear for linear in linears):
            return linears
    return []


class _Stack:
    """The stacked projections of one module."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.sizes: list[int] = []
        self.computed: dict[int, tuple[Tensor, Tensor]] = {}
        """Input and output of the second projection (1) and the third (2), until taken."""

    def refresh(self, linears: list[nn.Linear]) -> None:
        self.weight = _concat(self.weight, [linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        assert len({bias is None for bias in biases}) == 1, "only some projections have a bias"
        self.bias = None if biases[0] is None else _concat(self.bias, biases)

    def patch(self, linears: list[nn.Linear], patches: Patches) -> None:
        self.sizes = [linear.out_features for linear in linears]
        patches.on_restore(self.computed.clear)
        for index, linear in enumerate(linears):
            patches.set(linear, _MEMBER, _Member(self, index))
            patches.set(linear, "forward", method(_take if index else _project, linear))


@dataclass
class _Member:
    """Which projection of a stack a linear layer is."""

    stack: _Stack
    index: int


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    """Compute the products of all, and return that of the first."""
    stack = vars(linear)[_MEMBER].stack
    first, *others = F.linear(x, stack.weight, stack.bias).split(stack.sizes, dim=-1)
    for index, out in enumerate(others, start=1):
        stack.computed[index] = x, out
    return first


def _take(linear: nn.Linear, x: Tensor) -> Tensor:
    member = vars(linear)[_MEMBER]
    computed_for, out = member.stack.computed.pop(member.index, (None, None))
    return out if out is not None and computed_for is x else nn.Linear.forward(linear, x)


def _concat(buffer: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, into the same memory as before if it fits."""
    rows = sum(map(len, tensors))
    if buffer is None or len(buffer) != rows or buffer.dtype != tensors[0].dtype:
        buffer = tensors[0].new_empty(rows, *tensors[0].shape[1:])
    return torch.cat([tensor.detach() for tensor in tensors], out=buffer)
