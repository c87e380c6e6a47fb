"""Put something in an object's place for a while, on that object alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn


def replace_attribute(owner: Any, name: str, value: Any, stack: ExitStack) -> None:
    """Set an attribute of one object, and have it as it was when the stack unwinds.

    A module whose forward someone else already replaced keeps theirs.
    """
    before = vars(owner).get(name)
    if isinstance(owner, nn.Module) and before is not None and not hasattr(before, "ours"):
        return
    value.ours = True
    stack.callback(_put_back, owner, name, before)
    vars(owner)[name] = value


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        del vars(owner)[name]
    else:
        vars(owner)[name] = before
