"""Which adapters of a model are on, and how strongly (LoRA and its kin, as PEFT puts them in).

Switching one off, choosing another or scaling it changes what a forward computes, and no tensor
shows it. PEFT is not imported: its layers are known by a property that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

Switches = list[tuple[Any, ...]]
"""Of every layer with adapters: whether they are off, which are chosen, merged; their scales."""


def adapted_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that carry adapters."""
    return [module for module in modules if _carries(type(module))]


def switches(layers: Sequence[Any]) -> Switches:
    """What a forward through these layers goes by, beside their tensors."""
    return [
        (
            layer.disable_adapters,
            _copied(layer.active_adapter),
            _copied(getattr(layer, "merged_adapters", None)),
            _copied(vars(layer).get("scaling")),
        )
        for layer in layers
    ]


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


@lru_cache(maxsize=1024)
def _carries(kind: type[nn.Module]) -> bool:
    # Models of Transformers have a method of this name.
    return isinstance(getattr(kind, "disable_adapters", None), property)
