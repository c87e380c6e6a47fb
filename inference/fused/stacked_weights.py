"""`QKVWeights`: stacked copies of Q, K and V weights, so that one product computes all three.

Alone, each of the three products is too small to fill a device. The copies take a few percent of
the model's memory and are refreshed at every call of the engine; parameters are untouched.

    x ─▶ [ Wq ; Wk ; Wv ] ─▶ q | k | v      q_proj computes all; k_proj and v_proj return theirs
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
    """The stacked weights of one model, always at the same address: CUDA graphs hold addresses."""

    __name__ = "qkv projections"

    def __init__(self) -> None:
        self._stacks: dict[int, _Stack] = {}
        self._stack_of: dict[nn.Module, _Stack] = {}

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        """Copy the weights and replace the projections."""
        self._stack_of = {}
        for index, module in enumerate(modules):
            linears = _qkv_linears(module)
            if linears:
                stack = self._stacks.setdefault(index, _Stack())
                stack.refresh(linears)
                patches.on_refresh(partial(stack.refresh, linears))
                stack.patch(linears, patches)
                self._stack_of[module] = stack

    def weights(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the stacked weight and bias of an attention module; only while applied."""
        stack = self._stack_of[module]
        assert stack.weight is not None
        return stack.weight, stack.bias


def stacked_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the bytes that the copies of a model take."""
    size = 0
    for module in model.modules():
        size += sum(linear.weight.numel() for linear in _qkv_linears(module)) * itemsize
    return size


def _qkv_linears(module: nn.Module) -> list[Any]:
    """Return a module's three projections if it has them and they are plain, else nothing."""
    linears = [module._modules.get(name) for name in ("q_proj", "k_proj", "v_proj")]
    return linears if all(type(linear) is nn.Linear for linear in linears) else []


class _Stack:
    """The stacked projections of one attention module."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}
        """Input and output of k (1) and v (2), until they are taken."""

    def refresh(self, linears: list[nn.Linear]) -> None:
        self.weight = _concat(self.weight, [linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        assert len({bias is None for bias in biases}) == 1, "only some projections have a bias"
        self.bias = None if biases[0] is None else _concat(self.bias, biases)

    def patch(self, linears: list[nn.Linear], patches: Patches) -> None:
        sizes = [linear.out_features for linear in linears]
        patches.on_restore(self._computed.clear)
        patches.set(linears[0], "forward", partial(self._project_q, sizes=sizes))
        for index in (1, 2):
            forward = partial(self._take_kv, index=index, linear=linears[index])
            patches.set(linears[index], "forward", forward)

    def _project_q(self, x: Tensor, sizes: list[int]) -> Tensor:
        assert self.weight is not None
        q, k, v = F.linear(x, self.weight, self.bias).split(sizes, dim=-1)
        self._computed[1], self._computed[2] = (x, k), (x, v)
        return q

    def _take_kv(self, x: Tensor, index: int, linear: nn.Linear) -> Tensor:
        computed_for, out = self._computed.pop(index, (None, None))
        return out if out is not None and computed_for is x else nn.Linear.forward(linear, x)


def _concat(buffer: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, into the same memory as before if it fits."""
    rows = sum(map(len, tensors))
    if buffer is None or len(buffer) != rows or buffer.dtype != tensors[0].dtype:
        buffer = tensors[0].new_empty(rows, *tensors[0].shape[1:])
    return torch.cat([tensor.detach() for tensor in tensors], out=buffer)
