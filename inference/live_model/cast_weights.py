"""Low-precision weight copies instead of per-matmul autocast; detection of the autocast dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import layer_shapes
from .borrow import eager_calls


def detect_autocast_dtype(model: Any) -> torch.dtype | None:
    """Return the autocast dtype that a mixed-precision trainer put into the model's forward."""
    device_type = next(model.parameters()).device.type
    dtypes: list[torch.dtype] = []

    def record_dtype(*_: Any) -> None:
        if torch.is_autocast_enabled(device_type):
            dtypes.append(torch.get_autocast_dtype(device_type))

    layer = next(module for module in model.modules() if is_matmul(module))
    hook = layer.register_forward_pre_hook(record_dtype)
    try:
        with torch.autocast(device_type, enabled=False), eager_calls(list(model.modules())):
            layer_shapes(model)
    finally:
        hook.remove()
    return dtypes[0] if dtypes else None


class CastWeights:
    """Low-precision copies of a model's matmul weights.

    Under autocast every matmul would cast its weight again. While `active`, the copies replace the
    weights, with the same results as autocast. Between calls a trainer may replace, tie, resize or
    load parameters: the parameters that the modules hold now are copied, and restored.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype):
        self._dtype = dtype
        self._copies: dict[tuple[nn.Module, str], Tensor] = {}
        self.refresh(modules)

    @property
    def bytes(self) -> int:
        return sum({copy.data_ptr(): copy.nbytes for copy in self._copies.values()}.values())

    def refresh(self, modules: Sequence[nn.Module]) -> bool:
        """Update the copies; return whether one has a new address, which graphs hold."""
        before, self._copies = self._copies, {}
        reusable = {id(copy) for copy in before.values()}
        copies: dict[int, Tensor] = {}  # by parameter: tied ones share a copy
        moved = False
        for module, name, parameter in self._to_cast(modules):
            copy = copies.get(id(parameter))
            if copy is None:
                copy = before.get((module, name))
                if copy is None or copy.shape != parameter.shape or id(copy) not in reusable:
                    copy, moved = torch.empty_like(parameter, dtype=self._dtype), True
                reusable.discard(id(copy))
                copies[id(parameter)] = copy.copy_(parameter.detach())
            self._copies[module, name] = copy
        return moved

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the weights by the copies inside the block."""
        originals = [(m._parameters, name, m._parameters[name]) for m, name in self._copies]
        copies: list[Any] = list(self._copies.values())
        try:
            for (holder, name, _), copy in zip(originals, copies, strict=True):
                holder[name] = copy
            yield
        finally:
            for (holder, name, parameter), copy in zip(originals, copies, strict=True):
                if holder.get(name) is copy:  # FSDP may have set its own parameter meanwhile
                    holder[name] = parameter

    def _to_cast(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in filter(is_matmul, modules):
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if parameter.dtype != self._dtype:
                    yield module, name, parameter


def is_matmul(module: nn.Module) -> bool:
    """Return whether a module multiplies its input by a weight matrix."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
