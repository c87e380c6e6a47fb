"""`Patches`: replace attributes of single objects, restore them, and apply them again.

An engine that runs one step at a time borrows and returns the model at every step. Its patches are
the same each time, so they are remembered and applied again by plain dict writes.

    set, set, set ──▶ restore ──▶ reapply, refresh ──▶ restore ──▶ reapply ──▶ …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class _Patch:
    attributes: dict[str, Any]
    """`vars()` of the patched object."""
    name: str
    original: Any
    """The object's own attribute before the first patch; None if it had none."""
    value: Any


class Patches:
    """Patched attributes of objects, and callbacks for when they are restored or refreshed."""

    def __init__(self) -> None:
        self._patches: dict[tuple[int, str], _Patch] = {}
        self._on_restore: list[Callable[[], None]] = []
        self._on_refresh: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object until `restore`.

        A module whose forward someone else has already replaced keeps that forward.
        """
        attributes = vars(owner)
        current = attributes.get(name)
        is_foreign = current is not None and not is_patch(current)
        if isinstance(owner, nn.Module) and is_foreign:
            return
        if not is_patch(value):
            value._nopad_patch = True
        earlier = self._patches.get((id(owner), name))
        original = current if earlier is None else earlier.original
        self._patches[id(owner), name] = _Patch(attributes, name, original, value)
        attributes[name] = value

    def on_restore(self, callback: Callable[[], None]) -> None:
        """Call a function at each `restore`."""
        self._on_restore.append(callback)

    def on_refresh(self, callback: Callable[[], None]) -> None:
        """Call a function at each `refresh`."""
        self._on_refresh.append(callback)

    def restore(self) -> None:
        """Give every object its original attributes back."""
        for patch in self._patches.values():
            if patch.original is None:
                patch.attributes.pop(patch.name, None)
            else:
                patch.attributes[patch.name] = patch.original
        for callback in self._on_restore:
            callback()

    def refresh(self) -> None:
        """Update what the patches hold copies of."""
        for callback in self._on_refresh:
            callback()

    def reapply(self) -> bool:
        """Apply all patches again; return False if an attribute was changed in between."""
        patches = self._patches.values()
        if any(patch.attributes.get(patch.name) is not patch.original for patch in patches):
            return False
        for patch in patches:
            patch.attributes[patch.name] = patch.value
        return True


def is_patch(value: Any) -> bool:
    """Return whether an attribute was set by `Patches`."""
    return hasattr(value, "_nopad_patch")


def method(function: Any, module: nn.Module) -> MethodType:
    """Return a function as a method of a module.

    torch.compile makes one graph for all modules with this method, and one for each partial.
    """
    function._nopad_patch = True
    return MethodType(function, module)
