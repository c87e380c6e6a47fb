"""The weights as the engine sees them: which version they are, and a narrow copy to compute with.

Cached keys are only good for the weights that made them. Every in-place update raises a tensor's
version counter, so the sum of the counters names a version; writes through `.data` do not, so a
checksum over a sample of every tensor goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SAMPLES = 32


class WeightsVersion:
    """Tell whether a model's weights are still those of the last call."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.number = 0
        self._counters: tuple[int, ...] = ()
        self._checksum = 0.0
        self._places: tuple[int, ...] = ()

    def refresh(self) -> bool:
        """Look at the weights; say whether they changed since the last look."""
        counters = self.counters()
        checksum = self._sample()
        changed = counters != self._counters or checksum != self._checksum
        self._counters, self._checksum = counters, checksum
        self.number += changed
        return changed

    def unchanged(self) -> bool:
        """Whether the version counters alone are still those of the last look: cheap, no device."""
        return self.counters() == self._counters

    def counters(self) -> tuple[int, ...]:
        """Version counter of every parameter and buffer."""
        return tuple(0 if t.is_inference() else t._version for t in self._tensors())

    def moved(self) -> bool:
        """Whether a parameter lies elsewhere than at the last look: graphs hold addresses."""
        before, self._places = self._places, tuple(t.data_ptr() for t in self._tensors())
        return before != self._places

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _sample(self) -> float:
        """Sum samples of every tensor, each with a weight of its own."""
        parts = []
        for tensor in self._tensors():
            flat = tensor.detach().reshape(-1)
            if len(flat):
                parts.append(flat[:: max(1, len(flat) // _SAMPLES)][: _SAMPLES + 1])
        if not parts:
            return 0.0
        sample = torch.cat(parts).double()
        order = torch.arange(1, len(sample) + 1, device=sample.device, dtype=torch.float64)
        return float((sample.nan_to_num() * order.sin()).sum())


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
