"""The weights as the engine sees them: which version they are, and a narrow copy to compute with.

Cached keys are only good for the weights that made them. Every in-place update raises a tensor's
version counter, so the sum of the counters names a version; writes through `.data` do not, so a
checksum over a sample of every tensor goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..attention import probe_layers

_SAMPLES = 32


class WeightsVersion:
    """Tell whether a model's weights are still those of the last call."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.number = 0
        self._seen: list[tuple[Mapping[str, Tensor | None], str, Tensor, int]] = []
        """Who holds each tensor under which name, and the tensor's version counter."""
        self._checksum = 0.0
        self._places: tuple[int, ...] = ()

    def refresh(self) -> bool:
        """Look at the weights; say whether they changed since the last look."""
        unchanged, checksum = bool(self._seen) and self.unchanged(), self._sample()
        changed = not unchanged or checksum != self._checksum
        self._checksum = checksum
        self._seen = [
            (holder, name, tensor, _version(tensor))
            for module in self._model.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        self.number += changed
        return changed

    def unchanged(self, look: bool = False) -> bool:
        """Whether tensors and their counters are those of the last look: cheap, no device.

        With `look` their sample too: the device is waited for.
        """
        same = all(
            holder.get(name) is tensor and _version(tensor) == version
            for holder, name, tensor, version in self._seen
        )
        return same and (not look or self._sample() == self._checksum)

    def moved(self) -> bool:
        """Whether a parameter lies elsewhere than at the last look: graphs hold addresses."""
        before, self._places = self._places, tuple(t.data_ptr() for t in self._tensors())
        return before != self._places

    def _tensors(self) -> Iterator[Tensor]:
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _sample(self) -> float:
        """Sum samples of every tensor, each with a weight of its own."""
        parts = []
        for tensor in self._tensors():
            count = tensor.numel()
            if count:
                apart = max(1, count // _SAMPLES)
                few = min(_SAMPLES + 1, -(-count // apart))
                flat = tensor.detach() if tensor.is_contiguous() else tensor.detach().reshape(-1)
                part = flat.as_strided((few,), (apart,))
                # Floats of one byte mix with no others; their bits do.
                parts.append(part.view(torch.uint8) if part.itemsize == 1 else part)
        if not parts:
            return 0.0
        sample = torch.cat(parts).double()
        order = torch.arange(1, len(sample) + 1, device=sample.device, dtype=torch.float64)
        return float((sample.nan_to_num() * order.sin()).sum())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def autocast_inside(model: Any) -> torch.dtype | None:
    """The dtype a wrapped forward casts to by itself, as trainers of mixed precision make it do."""
    kind = next(model.parameters()).device.type
    seen: list[torch.dtype] = []

    def look(*_: Any) -> None:
        if torch.is_autocast_enabled(kind):
            seen.append(torch.get_autocast_dtype(kind))

    watched = next(module for module in model.modules() if _multiplies(module))
    hook = watched.register_forward_pre_hook(look)
    try:
        with torch.autocast(kind, enabled=False):
            probe_layers(model)
    finally:
        hook.remove()
    return seen[0] if seen else None


class Shadow:
    """Narrow copies of the matrix weights of a model whose own are wider.

    Under autocast every matrix product would cast its weight anew. The copies stand in for the
    weights while `active`, and give what autocast would; the parameters themselves are not touched.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._pairs: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            if not _multiplies(module):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    copy = copies.setdefault(id(parameter), parameter.detach().to(dtype))
                    self._pairs.append((module, name, parameter, copy))

    @property
    def bytes(self) -> int:
        return sum({copy.data_ptr(): copy.nbytes for *_, copy in self._pairs}.values())

    @contextmanager
    def active(self, stale: bool = True) -> Iterator[None]:
        """Let the copies stand in for the weights, brought up to date first if stale."""
        if stale:
            with torch.no_grad():
                for _, _, parameter, copy in self._pairs:
                    copy.copy_(parameter)
        try:
            for module, name, _, copy in self._pairs:
                module._parameters[name] = copy  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for module, name, parameter, _ in self._pairs:
                module._parameters[name] = parameter  # pyright: ignore[reportArgumentType]


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
