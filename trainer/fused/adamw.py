"""AdamW whose step clips the gradient in the same pass: the norm first, then one fused update.

    clip_grad_norm_, then step    norm reads g; clipping reads and writes g; the update reads g
    ClippedAdamW.step             norm reads g; the update reads g and clips it in a register

Its state is that of `torch.optim.AdamW`: checkpoints of either load into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...runtime import world_size


class ClippedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with `max_norm`, to which the gradient's norm is clipped.

    For one process, DDP and FSDP2. Switch off the trainer's own clipping (no `clip_grad_norm_`,
    `max_grad_norm=0`).

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = ClippedAdamW([weight], lr=0.1, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> _ = optimizer.step()
    >>> optimizer.norm.item()
    5.0
    """

    def __init__(self, params: Any, *args: Any, max_norm: float = 1.0, **kwargs: Any):
        super().__init__(params, *args, **kwargs)
        for name in ("fused", "capturable", "differentiable"):
            if any(group[name] for group in self.param_groups):
                raise ValueError(
                    f"{name}=True: this optimizer has its own kernel and ignores a loss scale; "
                    "omit it, or use torch.optim.AdamW with clip_grad_norm_"
                )
        self.max_norm = max_norm
        self.norm: Tensor | None = None
        """The gradient's norm before clipping, at the last step; on the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradient and update the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            return loss
        if any(map(_is_shard, params)):
            raise ValueError(
                "under FSDP1 and DeepSpeed a rank holds a shard of the gradient, whose norm is not "
                "the total norm (FSDP1's NO_SHARD is refused too, since it looks the same): use "
                "torch.optim.AdamW and their own clipping, or FSDP2"
            )
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        if not all(map(_can_fuse, params)) or any(map(_needs_torch, self.param_groups)):
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, self.norm)
            super().step()
            return loss
        for group in self.param_groups:
            self._update(group, self.norm)
        return loss

    def _update(self, group: dict[str, Any], norm: Tensor) -> None:
        from ...kernels import adamw_update

        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] = state["step"].cpu() + 1  # torch's fused AdamW keeps it on the device
            adamw_update(
                param,
                param.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                norm,
                max_norm=self.max_norm,
                step=state["step"].item(),
                **options,
            )


def _is_shard(param: Tensor) -> bool:
    """Whether FSDP1 or DeepSpeed's ZeRO 3 has marked a parameter as sharded by them."""
    return (hasattr(param, "_fsdp_flattened") and world_size() > 1) or hasattr(param, "ds_id")


def _can_fuse(param: Tensor) -> bool:
    """Whether a parameter is one dense block on the GPU, and its gradient too; else torch steps."""
    grad = param.grad
    assert grad is not None
    same_layout = grad.dtype == param.dtype and grad.stride() == param.stride()
    return type(param.data) is Tensor and param.is_cuda and same_layout and param.is_contiguous()


def _needs_torch(group: dict[str, Any]) -> bool:
    """Whether a group has options that the kernel does not implement."""
    return group["amsgrad"] or group["maximize"] or torch.is_tensor(group["lr"])
