"""Stop a training that diverged: a loss or weights that are not finite.

    losses of a step ─▶ sum over ranks, on the device ─▶ read after the next step ─▶ NonFiniteError
    weights ─▶ one sum per parameter ─▶ before a save: none replaces a checkpoint that is finite

Reading the loss of the current step would wait for the device. On a CPU it is read at once, which
is before the optimizer uses the gradient where the trainer permits it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...runtime import HostCopy, sum_over_ranks, world_size
from ..banner import print_banner

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types that can be summed; quantized weights are frozen."""
DIVERGED = "lower the learning rate or lengthen the warmup"
OWN_LOSS = (
    "divide the sum of your token losses by batch['num_items_in_batch'], which is exact; their "
    "mean would be a mean of means over packs, and nan in a pack without labels"
)
"""Advice for a loss that is not the model's."""


class NonFiniteError(FloatingPointError):
    """The loss or the weights of a training are not finite: it has diverged."""


class FiniteCheck:
    """Raise on all ranks after a step whose loss is not finite on any of them."""

    def __init__(self, continue_on_nan: bool = False):
        """continue_on_nan: continue training; weights that are not finite are still never saved."""
        self.continue_on_nan = continue_on_nan
        self.advice = DIVERGED
        """Advice for a loss that is not finite."""
        self._losses: list[Tensor] = []
        self._pending: tuple[str, HostCopy] | None = None
        """The name of the last step whose loss was not read yet, and that loss."""

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, or the losses of its tokens."""
        if not self.continue_on_nan:
            self._losses.append(loss.detach().float().sum())

    def end_step(self, place: str) -> None:
        """End a step, on every rank; on an accelerator, raise for the step before it.

        place: names the step in the error.
        """
        if not self._losses:
            return
        total = torch.stack(self._losses).sum()
        self._losses.clear()
        if world_size() > 1:
            total = sum_over_ranks(total)
        if total.device.type != "cpu":
            self.flush()
            self._pending = place, HostCopy(total)
        else:
            raise_if_not_finite(float(total), place, self.advice)

    def flush(self) -> None:
        """Raise for the last step, if its loss was not read yet; waits until it is computed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            raise_if_not_finite(float(pending[1].read()), pending[0], self.advice)

    def may_save(self, model: Any, place: str) -> bool:
        """Return whether the weights are finite; raise if they are not and training must stop."""
        self.flush()
        try:
            check_weights(model, place)
        except NonFiniteError as error:
            if not self.continue_on_nan:
                raise
            print_banner([f"no checkpoint: {error}"])
            return False
        return True


def raise_if_not_finite(loss: float, place: str, advice: str = DIVERGED) -> None:
    """Raise if the loss of a step is not finite."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss} at {place}: {advice}; the checkpoints saved before are finite"
        )


def check_weights(model: Any, place: str) -> None:
    """Raise if a weight is not finite on any rank; call it on every rank."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    # A sum needs no memory, and is not finite if any entry is not.
    sums = [
        p.detach().sum(dtype=torch.float32)
        for p in shards
        if p.dtype in DTYPES and p.device.type != "meta"
    ]
    found = {device: [s for s in sums if s.device == device] for device in {s.device for s in sums}}
    finite = all(bool(torch.stack(of_device).isfinite().all()) for of_device in found.values())
    if sum_over_ranks(not finite):
        raise NonFiniteError(
            f"the weights are not finite after {place}: {DIVERGED}; the checkpoints saved before "
            "are finite"
        )
