"""Put things in objects' places for a while, on those objects alone.

An engine that is asked for one step at a time takes the model and hands it back at every step. What
it puts in stays the same from step to step, so it is remembered, and put in again by plain lookups.

    put, put, put ──▶ out ──▶ back ──▶ out ──▶ back ──▶ …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Patches:
    """What stands in for attributes of objects, and what is to be done whenever it is taken out."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str, Any, Any]] = {}
        """Of each object's attribute: where it lies, its name, what it was and what it is now."""
        self._after: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object until `out`.

        A module whose forward someone else already replaced keeps theirs.
        """
        own = vars(owner)
        before = own.get(name)
        if isinstance(owner, nn.Module) and before is not None and not hasattr(before, "ours"):
            return
        value.ours = True
        _, _, first, _ = self._places.get((id(owner), name), (None, None, before, None))
        self._places[id(owner), name] = own, name, first, value
        own[name] = value

    def on_restore(self, forget: Callable[[], None]) -> None:
        """Have something done at each `out`."""
        self._after.append(forget)

    def restore(self) -> None:
        """Leave every object as it was found."""
        for own, name, before, _ in self._places.values():
            if before is None:
                own.pop(name, None)
            else:
                own[name] = before
        for forget in self._after:
            forget()

    def reapply(self) -> bool:
        """Put everything in again, unless some object is no longer as it was left."""
        places = self._places.values()
        if any(own.get(name) is not before for own, name, before, _ in places):
            return False
        for own, name, _, value in places:
            own[name] = value
        return True
