"""`StateKernels`: convolutions and delta rules that update the states of decodes in place.

    mixer ─▶ its own forward ─▶ causal_conv1d_update, torch_recurrent_gated_delta_rule: ours

Transformers calls these functions for one token of each sequence. Ours get the states of all rows,
and read from the context which rows are the step's: a compiled graph then holds for every step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf import IN_PLACE, StatePool, current_rows, in_rows
from ...runtime import global_of, rebind_global, stock_class
from ..live_model.patches import Patches

CONV = "causal_conv1d_update"
DELTA_RULE = "torch_recurrent_gated_delta_rule"


class StateKernels:
    """Kernels for the modules of a model of which every state is updated by such a function."""

    __name__ = "kernels for states"

    def __init__(self, states: StatePool):
        self._modules = states.modules
        self._with_kernels = cache(_with_kernels)

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        found = False
        for module, kept in self._modules.items():
            stock = inspect.unwrap(stock_class(module).forward)
            functions = zip((CONV, DELTA_RULE), kept.state, strict=True)
            if all(state is None or global_of(stock, name) for name, state in functions):
                device = next(module.parameters()).device
                forward = partial(self._with_kernels(stock, device), module)
                setattr(forward, IN_PLACE, True)
                patches.set(module, "forward", forward)
                found |= vars(module)["forward"] is forward
        assert found, "states that are updated by other functions"


def _with_kernels(forward: Any, device: torch.device) -> FunctionType:
    """Return a copy of a forward that calls our functions where it calls stock ones."""
    for name, function in ((CONV, _update_conv), (DELTA_RULE, _update_delta_rule)):
        stock = global_of(forward, name)
        if stock is not None:
            assert _agree(name, inspect.unwrap(stock), function, device), f"another {name}"
            forward = rebind_global(forward, name, function)
    # torch.compile keeps its graphs with the code, and the stock forward has the same
    forward.__code__ = forward.__code__.replace()  # of the copy
    return forward


def _run_conv(function: Any, states: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, bias = values[:16].view(2, 8, 1), values[16:48].view(8, 4), values[48:56]
    return function(x, states, weight, bias, "silu"), states


def _run_delta_rule(function: Any, states: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    q, k = values[:64].view(2, 2, 1, 2, 8)
    v, decay, beta = values[64:80].view(2, 1, 2, 4), -(values[:4] ** 2), values[4:8] ** 2
    step = q, k, v, decay.view(2, 1, 2), beta.view(2, 1, 2)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return function(*step, initial_state=states, **options)


def _agree(name: str, stock: Any, function: Any, device: torch.device) -> bool:
    """Whether our function computes what a stock one does, in fp32.

    The logits of a short trial may hardly show a difference.
    """
    run, shape = (_run_conv, (8, 4)) if name == CONV else (_run_delta_rule, (2, 8, 4))
    values = torch.arange(1, 301, dtype=torch.float32, device=device).sin()
    states, rows = values[-3 * math.prod(shape) :].view(3, *shape), torch.tensor([2, 0])
    rows = rows.to(device)
    expected, new = run(stock, states[rows], values)
    with in_rows(rows):
        out, states = run(function, states.clone(), values)
    pairs = (out, expected), (states[rows], new)
    return all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in pairs)


def _update_conv(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    assert hidden_states.shape[-1] == 1 and activation in (None, "silu", "swish")
    x = hidden_states[..., 0]
    return _conv_step(x, conv_state, weight, bias, activation is not None)[..., None]


def _update_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    assert query.shape[1] == 1
    step = [x[:, 0] for x in (query, key, value, g, beta)]
    return _delta_rule_step(*step, initial_state, use_qk_l2norm_in_kernel)[:, None], initial_state


@torch.library.custom_op("nopad::conv_step", mutates_args=("states",))
def _conv_step(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    from ...kernels import conv_step

    return conv_step(x, states, current_rows(), weight, bias, silu)


@_conv_step.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nopad::delta_rule_step", mutates_args=("states",))
def _delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, normalize: bool
) -> Tensor:
    from ...kernels import delta_rule_step

    return delta_rule_step(q, k, v, decay, beta, states, current_rows(), normalize)


@_delta_rule_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)
