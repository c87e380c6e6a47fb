"""Computing in a narrower dtype than the weights': which one, and copies of the weights in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import layer_shapes


def detect_autocast_dtype(model: Any) -> torch.dtype | None:
    """The dtype a wrapped forward casts to by itself, as trainers of mixed precision make it do."""
    kind = next(model.parameters()).device.type
    seen: list[torch.dtype] = []

    def look(*_: Any) -> None:
        if torch.is_autocast_enabled(kind):
            seen.append(torch.get_autocast_dtype(kind))

    watched = next(module for module in model.modules() if is_matmul(module))
    hook = watched.register_forward_pre_hook(look)
    try:
        with torch.autocast(kind, enabled=False):
            layer_shapes(model)
    finally:
        hook.remove()
    return seen[0] if seen else None


class CastWeights:
    """Narrow copies of the matrix weights of a model whose own are wider.

    Under autocast every matrix product would cast its weight anew. The copies stand in for the
    weights while `active`, and give what autocast would. Between calls a trainer may replace, tie,
    resize or load parameters: what counts is what the modules hold now, and that is put back.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype):
        self._dtype = dtype
        self._copies: dict[tuple[nn.Module, str], Tensor] = {}
        self.refresh(modules)

    @property
    def bytes(self) -> int:
        return sum({copy.data_ptr(): copy.nbytes for copy in self._copies.values()}.values())

    def refresh(self, modules: Sequence[nn.Module]) -> bool:
        """Bring the copies up to date; say whether one moved: graphs hold addresses."""
        before, self._copies = self._copies, {}
        free = {id(copy) for copy in before.values()}
        made: dict[int, Tensor] = {}  # of each parameter: tied ones share a copy
        moved = False
        for module, name, parameter in self._wider(modules):
            copy = made.get(id(parameter))
            if copy is None:
                copy = before.get((module, name))
                if copy is None or copy.shape != parameter.shape or id(copy) not in free:
                    copy, moved = torch.empty_like(parameter, dtype=self._dtype), True
                free.discard(id(copy))
                made[id(parameter)] = copy.copy_(parameter.detach())
            self._copies[module, name] = copy
        return moved

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the copies stand in for the weights."""
        found = [(m._parameters, name, m._parameters[name]) for m, name in self._copies]
        copies: list[Any] = list(self._copies.values())
        try:
            for (holder, name, _), copy in zip(found, copies, strict=True):
                holder[name] = copy
            yield
        finally:
            for (holder, name, parameter), copy in zip(found, copies, strict=True):
                if holder.get(name) is copy:  # sharded models put theirs in by themselves
                    holder[name] = parameter

    def _wider(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in filter(is_matmul, modules):
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if parameter.dtype != self._dtype:
                    yield module, name, parameter


def is_matmul(module: nn.Module) -> bool:
    """Whether a module is a product with a matrix of weights."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
