"""What a model computes besides its tensors: classes, forwards, hooks and plain attributes.

Attention reads attributes such as `scaling` or `sliding_window`, hooks and replaced forwards change
what a layer returns, and none of it raises a tensor's version counter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_KINDS = {bool, int, float, str, tuple, FunctionType, MethodType, partial}
"""Types of attributes that are compared; tensors have version counters, modules are visited."""
_IGNORED = {"training", "gradient_checkpointing", "use_cache", "forward"}
"""Switches of training, which do not change what generation computes; `forward` is compared in
any form."""
_LONGEST_SEEN = "max_seq_len_cached"
"""What a rotary embedding notes of its last forward; the frequencies themselves are tensors."""
OWN_HOOK = "_nopad_hook"
"""Attribute of hooks that the engine itself adds for a call."""


def forward_state(modules: Iterable[nn.Module]) -> list[Any]:
    """Return what to compare: two equal states compute the same function of the same tensors."""
    state: list[Any] = []
    configs: dict[int, Any] = {}
    for module in modules:
        attributes = vars(module)
        state.append(type(module))
        state.append(type(module).forward)
        state.append(attributes.get("forward"))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if hooks:  # their numbers are never used again
                state += [key for key, hook in hooks.items() if not hasattr(hook, OWN_HOOK)]
        state += _plain_attributes(attributes)
        if (config := attributes.get("config")) is not None:
            configs[id(config)] = config
    for config in configs.values():
        state += _plain_attributes(getattr(config, "__dict__", {}))
    return state


def _plain_attributes(attributes: dict[str, Any]) -> list[Any]:
    return [
        pair
        for pair in attributes.items()
        if type(pair[1]) in _KINDS
        and pair[0] not in _IGNORED
        and pair[0][0] != "_"
        and not pair[0].endswith(_LONGEST_SEEN)
    ]
