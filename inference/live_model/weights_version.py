"""The weights as the engine sees them: whether they are still those of the last call.

Cached keys are only good for the weights that made them. Every in-place update raises a tensor's
version counter; writes through `.data` do not, so a checksum over a sample of every tensor goes
with it. Which adapters are on, and how strongly, counts as well: no tensor shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .adapters import AdapterState, Layer, adapted_layers, adapter_state, adapters_changed

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
        self._adapted: list[Layer] = []
        self.adapters: AdapterState = []
        """Which adapters were on at the last look."""

    def refresh(self) -> bool:
        """Look at the weights; say whether they changed since the last look."""
        unchanged, checksum = bool(self._seen) and self.unchanged(), self._sample()
        changed = not unchanged or checksum != self._checksum
        self._checksum = checksum
        self._adapted = adapted_layers(self._model.modules())
        self.adapters = adapter_state(self._adapted)
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
        """Whether tensors, their counters and adapters are those of the last look: no device.

        With `look` their sample too: the device is waited for.
        """
        same = all(
            holder.get(name) is tensor and _version(tensor) == version
            for holder, name, tensor, version in self._seen
        )
        same = same and not adapters_changed(self._adapted, self.adapters)
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
        with torch.autocast(parts[0].device.type, enabled=False):  # it may refuse such a mixture
            sample = torch.cat(parts).double()
        order = torch.arange(1, len(sample) + 1, device=sample.device, dtype=torch.float64)
        return float((sample.nan_to_num() * order.sin()).sum())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
