"""AdamW whose step clips the gradient on the way: the norm first, then one pass over everything.

    clip_grad_norm_, then step    the norm reads g; scaling reads and writes g; the update reads it
    ClippedAdamW.step             the norm reads g; the update reads it and scales in a register

Its state is that of `torch.optim.AdamW`, so that checkpoints go from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...runtime import world_size


class ClippedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with `max_norm`, the largest norm that a gradient may keep.

    For one process, DDP and FSDP2. Leave out the trainer's own clipping (`clip_grad_norm_`, or
    `max_grad_norm=0`).

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = ClippedAdamW([weight], lr=0.1, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> _ = optimizer.step()
    >>> optimizer.norm.item()
    5.0
    """

    def __init__(self, params: Any, *args: Any, max_norm: float = 1.0, **settings: Any):
        super().__init__(params, *args, **settings)
        for name in ("fused", "capturable", "differentiable"):
            if any(group[name] for group in self.param_groups):
                raise ValueError(
                    f"{name}=True: this step has kernels of its own, and reads no loss scale; "
                    "leave it out, or use torch.optim.AdamW with clip_grad_norm_"
                )
        self.max_norm = max_norm
        self.norm: Tensor | None = None
        """The gradient's norm before clipping, at the last step; on the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not given:
            return loss
        if any(map(_a_piece, given)):
            raise ValueError(
                "under FSDP1 and DeepSpeed a rank has a piece of the gradient, whose norm is not "
                "that of the whole (under FSDP1's NO_SHARD too, which is not told apart): use "
                "torch.optim.AdamW and their own clipping, or FSDP2"
            )
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in given])
        if not all(_fusible(p) for p in given) or any(map(_special, self.param_groups)):
            torch.nn.utils.clip_grads_with_norm_(given, self.max_norm, self.norm)
            super().step()
            return loss
        for group in self.param_groups:
            self._update(group, self.norm)
        return loss

    def _update(self, group: dict[str, Any], norm: Tensor) -> None:
        from ...kernels.adamw import update

        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] = state["step"].cpu() + 1  # torch's fused one keeps it on the device
                update(parameter, state, norm, self.max_norm, group)


def _a_piece(p: Tensor) -> bool:
    """Whether FSDP1 or DeepSpeed's ZeRO 3 has marked a parameter as theirs, and shares it out."""
    return (hasattr(p, "_fsdp_flattened") and world_size() > 1) or hasattr(p, "ds_id")


def _fusible(p: Tensor) -> bool:
    """One dense block on the GPU, its gradient alike; sharded parameters take torch's way."""
    gradient = p.grad
    assert gradient is not None
    alike = gradient.dtype == p.dtype and gradient.stride() == p.stride()
    return type(p.data) is Tensor and p.is_cuda and alike and p.is_contiguous()


def _special(group: dict[str, Any]) -> bool:
    return group["amsgrad"] or group["maximize"] or torch.is_tensor(group["lr"])
