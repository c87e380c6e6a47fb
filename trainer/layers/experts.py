"""Run the experts of a layer by grouped matrix products, where a trial gives the same results.

    tokens ─▶ rows sorted by expert ─▶ up ─▶ gate ─▶ down ─▶ weighted, summed by token

Router, activation, biases and norms are the model's own. Under autocast the products run in its
dtype, as those of linear layers do; Transformers' grouped products run in the weights' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import grouped_mm
from .class_swap import SwappedLayers, added_forwards
from .equivalence import outputs_match, trial_copy, trial_input

_STOCK = None, "eager", "grouped_mm", "batched_mm"
"""Ways of Transformers to run experts; a user who names another one wants just that."""


def group_experts(model: nn.Module, swapped: SwappedLayers, device: torch.device) -> None:
    """Run the experts of a model by grouped products, where a trial on `device` gives the same."""
    verdicts: dict[tuple, bool] = {}
    for experts in filter(_is_known, model.modules()):
        kind = type(experts), *(p.shape for p in experts.parameters())
        if kind not in verdicts:
            verdicts[kind] = _matches(trial_copy(experts, device))
        if verdicts[kind]:
            swapped.swap(experts, grouped_forward)


def quantized_experts(model: nn.Module) -> str:
    """Return the name and dtype of a quantized weight of experts; "" if there is none."""
    for name, weight in model.named_parameters():
        if weight.ndim > 2 and is_quantized(weight):
            return f"{name} is {weight.dtype}"
    return ""


def is_quantized(weight: Tensor) -> bool:
    return not weight.is_floating_point() or weight.itemsize < 2


def _is_known(module: Any) -> bool:
    names = {"num_experts", "has_gate", "has_bias", "is_transposed"}
    return (
        names <= vars(module).keys()
        and module.config._experts_implementation in _STOCK
        and len(module.down_proj) == module.num_experts  # else in part on other ranks
        and not is_quantized(module.down_proj)
        and grouped_forward not in added_forwards(type(module))
    )


def _matches(experts: Any) -> bool:
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    x = trial_input(up, experts.num_experts, up.shape[1 if experts.is_transposed else 2])
    first = torch.arange(experts.num_experts, device=x.device)
    chosen = torch.stack([first, (first + 1) % experts.num_experts], -1)
    shares = trial_input(up, *chosen.shape)
    return outputs_match(
        lambda x, shares: type(experts).forward(experts, x, chosen, shares),
        lambda x, shares: experts_forward(experts, x, chosen, shares),
        [x, shares],
        list(experts.parameters()),
    )


def grouped_forward(experts: Any, fallback: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Run experts by grouped products: see `class_swap.Forward`."""
    if len(args) != 3 or kwargs or getattr(experts, "_is_expert_parallel", False):
        return None
    return experts_forward(experts, *args)


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts that the router chose [T, k] on hidden states [T, C]."""
    tokens, top_k = top_k_index.shape
    expert_ids, order = torch.sort(top_k_index.flatten(), stable=True)
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    count = torch.arange(experts.num_experts, device=order.device)
    offsets = torch.searchsorted(expert_ids, count, right=True, out_int32=True)
    dtype = _product_dtype(hidden_states)
    x = _SortTokens.apply(hidden_states.to(dtype), order, inverse, top_k)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    x = _linear(experts, name, x, expert_ids, offsets)
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    x = _linear(experts, "down_proj", x.to(dtype), expert_ids, offsets)
    if getattr(experts, "has_post_expert_norm", False):  # Transformers 5.18 or newer
        x = experts.post_expert_norm(x)
    x = _Reorder.apply(x, inverse, order).view(tokens, top_k, -1)
    return (x * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _linear(experts: Any, name: str, x: Tensor, expert_ids: Tensor, offsets: Tensor) -> Tensor:
    weight = getattr(experts, name).to(x.dtype)
    out = grouped_mm(x, weight.transpose(1, 2) if experts.is_transposed else weight, offsets)
    return (
        out + getattr(experts, name + "_bias")[expert_ids].to(x.dtype) if experts.has_bias else out
    )


class _SortTokens(torch.autograd.Function):
    """[T, C] -> [T * k, C]: a row per token and expert, by expert; backward without atomics."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        return x[order // top_k]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, inverse, ctx.top_k = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        grads = grad[inverse].view(-1, ctx.top_k, grad.shape[-1])
        return grads.sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """x[index] for a permutation whose inverse is known; backward without atomics."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
