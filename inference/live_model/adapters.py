"""Which adapters of a model are on, and how strongly (LoRA and its kin, as PEFT puts them in).

Switching one off, choosing another or scaling it changes what a forward computes, and no tensor
shows it. PEFT is not imported: its layers are known by a property that all of them have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

Layer = Mapping[str, Any]
"""The attributes of a layer with adapters: read at every step, so without detours."""
AdapterState = list[tuple[Any, ...]]
"""Of every such layer: whether its adapters are off, which are chosen, merged; their scales."""


def adapted_layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """The layers that carry adapters."""
    return [vars(module) for module in modules if _carries(type(module))]


def adapter_state(layers: Sequence[Layer]) -> AdapterState:
    """What a forward through these layers goes by, beside their tensors."""
    return [tuple(map(_copied, _now(layer))) for layer in layers]


def adapters_changed(layers: Sequence[Layer], before: AdapterState) -> bool:
    """Whether they are no longer as they were."""
    return any(_now(layer) != then for layer, then in zip(layers, before, strict=True))


def _now(own: Layer) -> tuple[Any, ...]:
    get = own.get
    return get("_disable_adapters"), get("_active_adapter"), get("merged_adapters"), get("scaling")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


@lru_cache(maxsize=1024)
def _carries(kind: type[nn.Module]) -> bool:
    # Models of Transformers have a method of this name.
    return isinstance(getattr(kind, "disable_adapters", None), property)
