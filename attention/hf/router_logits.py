"""Return router logits from the graphs of compiled MoE layers, and collect them as stock layers do.

Transformers' hooks append router outputs to a list in a ContextVar, which torch.compile cannot
trace. Inside a layer's graph the hooks get a list of their own, and the graph returns it; outside,
it is added to the list of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector, maybe_install_capturing_hooks

KEY, CONFIG_NAME = "router_logits", "output_router_logits"


def has_router_logits(model: nn.Module) -> bool:
    """Return whether a model can return router logits, for its auxiliary loss."""
    return any(hasattr(part.config.get_text_config(), CONFIG_NAME) for part in _pretrained(model))


def install_router_hooks(model: nn.Module) -> None:
    """Install the hooks of a model with router logits; a model with such hooks is not picklable."""
    if has_router_logits(model):
        for part in _pretrained(model):
            if len(_pretrained(part)) == 1:  # an outer one would install those inside once more
                maybe_install_capturing_hooks(part)


def _pretrained(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def returning_router_logits(forward: Callable, *args: Any, **kwargs: Any) -> tuple[Any, list]:
    """Call a layer's forward inside a graph; return its output and its router logits."""
    collected: dict[str, list] = {KEY: []}
    before = _active_collector.set(collected)
    try:
        out = forward(*args, **kwargs)
    finally:
        _active_collector.reset(before)
    return out, collected[KEY]


def collect_router_logits(router_logits: list) -> None:
    """Collect the router logits of a layer if the current forward of its model wants them."""
    wanted = _active_collector.get() or {}
    if KEY in wanted:
        wanted[KEY].extend(router_logits)


def wants_other_outputs() -> bool:
    """Return whether the current forward wants outputs of layers that no graph returns."""
    return bool((_active_collector.get() or {}).keys() - {KEY})
