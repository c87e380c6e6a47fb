"""Run an attention's forward with other forwards of its projections.

The forward is called on a view: a shallow copy of the module in which some linear layers have other
forwards. The module itself is not changed, so threads may run it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn


def run_with_projections(
    forward: Callable[..., Any],
    module: nn.Module,
    projections: Mapping[str, Callable[[Tensor], Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `forward` on the module with these forwards of its layers, by their names."""
    view = _view(module, projections)
    out = forward(view, *args, **kwargs)
    for name, value in vars(view).items():  # attributes that the forward has set
        if name != "_modules" and vars(module).get(name, view) is not value:
            vars(module)[name] = value
    return out


def calls_projections_on_input(module: Any, forward: Callable[..., Any]) -> bool:
    """Whether a forward calls q, k and v with the module's own input, and with nothing else."""
    linears = {name: getattr(module, name) for name in ("q_proj", "k_proj", "v_proj")}
    first = linears["q_proj"]
    weight = first.weight
    x = torch.zeros(1, 2, first.in_features, dtype=weight.dtype, device=weight.device)
    called_on_x: list[bool] = []

    def recorder(width: int) -> Callable[[Tensor], Tensor]:
        def record(given: Tensor) -> Tensor:
            called_on_x.append(given is x)
            return x.new_zeros(1, 2, width)

        return record

    view = _view(module, {name: recorder(linear.out_features) for name, linear in linears.items()})
    parameters = list(signature(forward).parameters.values())[2:]
    required = {p.name: None for p in parameters if p.default is Parameter.empty
                and p.kind is not Parameter.VAR_KEYWORD}  # fmt: skip
    # Without rotary tables and the like, the forward may fail after its projections.
    with torch.no_grad(), suppress(Exception):
        forward(view, x, **required)
    return len(called_on_x) >= len(linears) and all(called_on_x)


def _view(module: nn.Module, forwards: Mapping[str, Callable[[Tensor], Tensor]]) -> Any:
    """Return a shallow copy of a module, some of whose layers have other forwards."""
    layers = {name: _shallow_copy(module._modules[name], forward=f) for name, f in forwards.items()}
    return _shallow_copy(module, _modules={**module._modules, **layers})


def _shallow_copy(module: Any, **attributes: Any) -> Any:
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), **attributes)
    return copy
